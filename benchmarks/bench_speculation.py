"""What stands around attention in speculative decoding on a GPU, and steps of its kinds beside plain ones.

Times are those of bench_paged_kv.py: a captured graph of many calls, its median over replays, by call. SGLang's kernels
are measured beside ours where `sgl_kernel` has them.

    python benchmarks/bench_speculation.py --parts trees,moves,verify,draft,loop,cross,items,chunks --write
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path

import torch
from attnops import ops
from attnops.backends import (
    DualChunkFlashAttentionBackend,
    EncoderDecoderBackend,
    MultiStepDraftBackend,
    select_backend,
)
from attnops.layers import RadixAttention
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from attnops.ops.speculation import DraftTree, TreeMaskMode, Verified
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits, MultiItemScoringParams
from bench_paged_kv import Bench
from records import RESULTS, write

DEVICE, BF16, I32 = "cuda", torch.bfloat16, torch.int32
HEADS, KV_HEADS, DIM = 32, 8, 128
CALLS = 20


def draft_loop(batch_size: int, num_tokens: int, topk: int, steps: int) -> dict:
    """Candidates of a loop and the best of them, closed under parents: the arguments of `build_draft_tree`."""
    rng = random.Random(1)
    groups, chosen = [], []
    for _ in range(batch_size):
        parents, branches, kept = [-1] * topk, list(range(topk)), [-1, *range(topk)]
        for step in range(1, steps):
            first = len(parents)
            for branch in branches:
                parents += [branch] * topk
            branches = sorted(rng.sample(range(first, len(parents)), topk))
            kept += branches if step < steps - 1 else []
        inside: set[int] = set()
        while len(inside) < num_tokens - 1:
            free = [c for c, p in enumerate(parents) if c not in inside and (p < 0 or p in inside)]
            inside.add(rng.choice(free))
        groups.append(kept)
        chosen.append(sorted(inside))
    tokens = torch.randint(0, 3, (batch_size, num_tokens), device=DEVICE)
    return {
        "parent_list": torch.tensor(groups, device=DEVICE),
        "top_scores_index": torch.tensor(chosen, device=DEVICE),
        "cache_seqlens": torch.full((batch_size,), 4096, dtype=I32, device=DEVICE),
        "topk": topk,
        "draft_tokens": tokens[:, 1:].contiguous(),
        "bonus_tokens": tokens[:, 0].contiguous(),
    }


def random_tree(batch_size: int, num_tokens: int) -> torch.Tensor:
    given = draft_loop(batch_size, num_tokens, 4, 5)
    return ops.build_draft_tree(**given).tree_mask


class SpeculationBench(Bench):
    def trees(self) -> None:
        for batch_size, num_tokens in ((64, 16), (1, 16), (64, 64)):
            given = draft_loop(batch_size, num_tokens, 4, 5)
            params = {"batch_size": batch_size, "num_tokens": num_tokens, "topk": 4, "draft_steps": 5}
            tree = DraftTree.allocate(batch_size, num_tokens, DEVICE)
            out = Verified.allocate(batch_size, num_tokens, 6, DEVICE)
            target = torch.randint(0, 3, (batch_size * num_tokens,), device=DEVICE)
            nodes = (tree.tokens.view(batch_size, -1), *tree[2:5])
            build = partial(ops.build_draft_tree, **given, out=tree)
            greedy = partial(ops.verify_tree_greedy, *nodes, target, out=out)
            self.cell("build_draft_tree", "attnops", params, [build] * CALLS)
            self.cell("verify_tree_greedy", "attnops", params, [greedy] * CALLS)
            self.cell("build and verify", "attnops", params, [lambda b=build, g=greedy: (b(), g())] * CALLS)
            self.sglang_trees(params, given, tree, out, target)
            probs = torch.rand(batch_size, num_tokens, 32_000, device=DEVICE).softmax(-1)
            coins = torch.rand(batch_size, num_tokens, device=DEVICE)
            sampling = partial(ops.verify_tree_sampling, *nodes, coins, coins[:, 0].contiguous(), probs, out=out)
            self.cell("verify_tree_sampling", "attnops", {**params, "vocabulary": 32_000}, [sampling] * CALLS)
            whole = torch.ones(batch_size, num_tokens, num_tokens, dtype=torch.bool, device=DEVICE).tril().flatten()
            packed = torch.empty_like(tree.tree_mask)
            pack = partial(ops.pack_tree_mask, whole, num_tokens, TreeMaskMode.QLEN_ONLY, tree_mask=packed)
            self.cell("pack_tree_mask", "attnops", params, [pack] * CALLS)

    def sglang_trees(self, params: dict, given: dict, tree: DraftTree, out: Verified, target: torch.Tensor) -> None:
        """SGLang's two kernels over the same loop, masks of N x N; its callers fill the destinations first."""
        try:
            import sgl_kernel  # noqa: F401

            build_op, verify_op = (
                torch.ops.sgl_kernel.build_tree_kernel_efficient.default,
                torch.ops.sgl_kernel.verify_tree_greedy.default,
            )
        except (ImportError, AttributeError) as error:
            print(f"skipped SGLang's trees: {error}")
            return
        batch_size, num_tokens = params["batch_size"], params["num_tokens"]
        mask = torch.ones(batch_size * num_tokens * num_tokens, dtype=torch.bool, device=DEVICE)
        positions = torch.empty(batch_size * num_tokens, dtype=torch.int64, device=DEVICE)
        links = torch.full((3, batch_size, num_tokens), -1, device=DEVICE)
        lengths = given["cache_seqlens"].long()
        lists = (given["parent_list"], given["top_scores_index"], lengths)
        numbers = (params["topk"], params["draft_steps"], num_tokens, 1)

        def build() -> None:
            links.fill_(-1)
            build_op(*lists, mask, positions, *links, *numbers)

        def build_alone() -> None:
            build_op(*lists, mask, positions, *links, *numbers)

        predicts, accepted, counts = (torch.empty_like(x) for x in out)
        candidates = tree.tokens.view(batch_size, num_tokens)
        expected = target.view(batch_size, num_tokens)

        def verify() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            verify_op(predicts, accepted, counts, candidates, *links, expected, stream)

        build()
        ours = ops.build_draft_tree(**given)
        same = all(torch.equal(x, y) for x, y in zip(links, ours[2:5])) and torch.equal(positions, ours.positions)
        note = "the same links and positions" if same else "other links or positions"
        self.cell("build_draft_tree", "sgl_kernel", params, [build_alone] * CALLS, note="its own kernel alone")
        build()
        self.cell("verify_tree_greedy", "sgl_kernel", params, [verify] * CALLS)
        self.cell("build and verify", "sgl_kernel", params, [lambda: (build(), verify())] * CALLS, note=note)

    def moves(self) -> None:
        layers, batch_size, nodes, page_size = 32, 64, 16, 64
        slots = batch_size * 2 * page_size
        for name, rows, dtype, buffers in (
            ("bfloat16, 8 heads of 128", (KV_HEADS, DIM), BF16, 2 * layers),
            ("float8_e4m3fn, 8 heads of 128", (KV_HEADS, DIM), torch.float8_e4m3fn, 2 * layers),
            ("bfloat16 latents", (576,), BF16, layers),
            ("rows of 656 bytes", (656,), torch.uint8, layers),
        ):
            pages = [
                torch.zeros(slots // page_size, page_size, *rows, dtype=dtype, device=DEVICE) for _ in range(buffers)
            ]
            rng = random.Random(2)
            paths = [[0, *sorted(rng.sample(range(6, nodes), 5))] for _ in range(batch_size)]
            accepted = torch.tensor([[b * nodes + i for i in path] for b, path in enumerate(paths)], device=DEVICE)
            first = torch.arange(batch_size, device=DEVICE).view(-1, 1) * 2 * page_size + 50
            loc = (first + torch.arange(nodes, device=DEVICE)).flatten()
            row = pages[0][0, 0].numel() * dtype.itemsize
            params = {"batch_size": batch_size, "accepted": 5, "layers": layers, "rows": name, "page_size": page_size}
            call = partial(ops.move_kv, accepted.int(), loc, pages)
            self.cell("move_kv", "attnops", params, [call] * CALLS, 2 * batch_size * 5 * buffers * row)
        table = torch.randint(0, 2**20, (batch_size, 8192), dtype=I32, device=DEVICE)
        given = (table, torch.arange(batch_size, device=DEVICE))
        lengths = torch.full((batch_size,), 4096 + 37, dtype=I32, device=DEVICE)
        indptr = torch.zeros(5, batch_size * 4 + 1, dtype=I32, device=DEVICE)
        indices = torch.zeros(5, batch_size * 4 * 4200, dtype=I32, device=DEVICE)
        params = {"batch_size": batch_size, "length": 4133, "topk": 4, "draft_steps": 5, "page_size": page_size}
        call = partial(
            ops.generate_draft_decode_kv_indices, *given, lengths, 4, 5, page_size, kv_indptr=indptr, kv_indices=indices
        )
        self.cell("generate_draft_decode_kv_indices", "attnops", params, [call] * CALLS)
        cells = torch.arange(batch_size * 8192, dtype=I32, device=DEVICE).view(batch_size, -1)
        pages = [
            torch.zeros(batch_size * 8192 // page_size, page_size, 1, DIM, dtype=BF16, device=DEVICE) for _ in range(2)
        ]
        call = partial(ops.copy_page_tail, cells, given[1], lengths, pages, 4, 5)
        self.cell("copy_page_tail", "attnops", {**params, "layers": 1, "num_kv_heads": 1}, [call] * CALLS)

    def verify(self, batch_size=64, length=4096, page_size=64) -> None:
        """Tree masks beside causal ones: the same queries, keys and plan."""
        count = batch_size * length // page_size
        table = torch.randperm(count, device=DEVICE).to(I32).view(batch_size, -1)
        lengths = torch.full((batch_size,), length, dtype=I32, device=DEVICE)
        pages = [torch.randn(count, page_size, KV_HEADS, DIM, device=DEVICE).to(BF16) for _ in range(2)]
        latents = torch.randn(count, page_size, 576, device=DEVICE).to(BF16)
        for num_tokens in (8, 16):
            mask = random_tree(batch_size, num_tokens)
            shape = {"batch_size": batch_size, "length": length, "s_q": num_tokens, "page_size": page_size}
            q = torch.randn(batch_size, num_tokens, HEADS, DIM, device=DEVICE).to(BF16)
            heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
            plan = XqaDecodePlan.allocate(
                batch_size, **heads, seqlen_q=num_tokens, max_seqlen_k=length, kv_dtype=BF16, device=DEVICE
            )
            ops.xqa_decode_plan(plan, lengths)
            step = partial(ops.xqa_decode, q, *pages, table, lengths, plan, out=torch.empty_like(q))
            self.beside("verify", {**shape, **heads}, step, partial(step, tree_mask=mask))
            q = torch.randn(batch_size, num_tokens, 16, 576, device=DEVICE).to(BF16)
            plan = MlaDecodePlan.allocate(batch_size, num_q_heads=16, seqlen_q=num_tokens, device=DEVICE)
            ops.mla_decode_plan(plan, lengths)
            out = torch.empty(*q.shape[:-1], 512, dtype=BF16, device=DEVICE)
            step = partial(ops.mla_decode, q, latents, table, lengths, plan, softmax_scale=0.1, out=out)
            self.beside("verify", {**shape, "heads": "16 of MLA"}, step, partial(step, tree_mask=mask))

    def beside(self, case: str, params: dict, causal, tree) -> None:
        times = []
        for kind, call in (("causal", causal), ("tree", tree)):
            self.cell(case, "attnops", {**params, "mask": kind}, [call] * 5)
            times.append(self.records[-1].ms)
        self.records[-1].note = f"{times[1] / times[0]:.3f} of the causal one's time"
        print(f"{'':18s} tree / causal {times[1] / times[0]:.3f}", flush=True)

    def draft(self) -> None:
        """The third of five steps, attention alone: 4 branches beside 1."""
        for page_size in (64, 1):
            times = {}
            for topk in (1, 4):
                step = DraftSteps(64, 4096, page_size, topk)
                step.prepare()
                calls = [partial(step.attend, 2)] * 5
                self.cell("draft step", "attnops", step.params, calls)
                times[topk] = self.records[-1].ms
            self.records[-1].note = f"{times[4] / times[1]:.3f} of the time of topk 1"
            print(f"{'':18s} topk 4 / topk 1 {times[4] / times[1]:.3f}", flush=True)

    def cross(self, batch_size=64, length=1500) -> None:
        """A decode step's cross-attention layer, beside the bare op over as many keys."""
        for page_size in (64, 1):
            spec = AttentionSpec(
                num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page_size, dtype=BF16
            )
            limits = Limits(max_batch_size=batch_size, max_seqlen=512)
            backend = EncoderDecoderBackend(select_backend, spec, limits, DEVICE, max_encoder_tokens=length)
            context = -(-length // page_size) * page_size + 512
            pool = MHATokenToKVPool(batch_size * context, page_size, BF16, KV_HEADS, DIM, 1, DEVICE)
            for pages in (*pool.k_buffer, *pool.v_buffer):
                pages.normal_()
            pages = torch.randperm(batch_size * context // page_size, device=DEVICE).view(batch_size, -1)
            slots = (pages.unsqueeze(-1) * page_size + torch.arange(page_size, device=DEVICE)).flatten(1).int()
            encoder_lens = torch.full((batch_size,), length, dtype=I32, device=DEVICE)
            batch = AttentionBatch(
                forward_mode=ForwardMode.DECODE,
                req_pool_indices=torch.arange(batch_size, device=DEVICE),
                cache_seqlens=torch.full((batch_size,), 100, dtype=I32, device=DEVICE),
                num_tokens=batch_size,
                req_to_token=slots,
                out_cache_loc=torch.zeros(batch_size, dtype=torch.int64, device=DEVICE),
                encoder_lens=encoder_lens,
                token_to_kv_pool=pool,
                attn_backend=backend,
            )
            layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, is_cross_attention=True)
            q = torch.randn(batch_size, HEADS, DIM, device=DEVICE).to(BF16)
            backend.init_forward_metadata(batch)
            params = {"batch_size": batch_size, "encoder_tokens": length, "page_size": page_size}
            self.cell("cross attention", "attnops", params, [partial(layer, q, None, None, batch)] * CALLS)
            ours = self.records[-1].ms
            heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
            plan = XqaDecodePlan.allocate(batch_size, **heads, max_seqlen_k=length, kv_dtype=BF16, device=DEVICE)
            ops.xqa_decode_plan(plan, encoder_lens)
            table, by_token = pages.int(), q.unsqueeze(1)
            keys = pool.get_kv_buffer(0)
            call = partial(ops.xqa_decode, by_token, *keys, table, encoder_lens, plan, out=torch.empty_like(by_token))
            self.cell("cross attention", "xqa_decode", params, [call] * CALLS)
            print(f"{'':18s} layer / op {ours / self.records[-1].ms:.3f}", flush=True)

    def items(self, prefix=2048, items=64, length=32, page_size=64) -> None:
        """A prompt of a prefix and items, beside a causal prefill of as many tokens."""
        total = prefix + items * length
        spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page_size, dtype=BF16)
        backend = select_backend(spec, Limits(max_batch_size=1, max_seqlen=total, max_num_tokens=total), DEVICE)
        pool = MHATokenToKVPool(total, page_size, BF16, KV_HEADS, DIM, 1, DEVICE)
        order = torch.randperm(total // page_size, device=DEVICE).unsqueeze(1) * page_size
        slots = (order + torch.arange(page_size, device=DEVICE)).view(1, -1)
        layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
        params = MultiItemScoringParams(
            prefix_len_ptr=torch.tensor([prefix], device=DEVICE),
            token_pos_in_items_ptr=torch.arange(length, device=DEVICE).repeat(items),
            token_pos_in_items_len=items * length,
        )
        q = torch.randn(total, HEADS, DIM, device=DEVICE).to(BF16)
        k, v = torch.randn(2, total, KV_HEADS, DIM, device=DEVICE).to(BF16)
        times = []
        for kind in (None, params):
            batch = AttentionBatch(
                forward_mode=ForwardMode.EXTEND,
                req_pool_indices=torch.zeros(1, dtype=torch.int64, device=DEVICE),
                cache_seqlens=torch.tensor([total], dtype=I32, device=DEVICE),
                num_tokens=total,
                req_to_token=slots.int(),
                out_cache_loc=slots.flatten(),
                extend_seq_lens=torch.tensor([total], dtype=I32, device=DEVICE),
                token_to_kv_pool=pool,
                attn_backend=backend,
                multi_item=kind,
            )
            backend.init_forward_metadata(batch)
            named = {"prefix": prefix, "items": items, "item_tokens": length, "mask": "items" if kind else "causal"}
            self.cell("multi-item", "attnops", named, [partial(layer, q, k, v, batch)] * 4)
            times.append(self.records[-1].ms)
        print(f"{'':18s} items / causal {times[1] / times[0]:.3f}", flush=True)

    def chunks(self, total=65_536, page_size=64) -> None:
        """A prefill in dual chunks, beside a causal one: both see the same keys."""
        spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page_size, dtype=BF16)
        limits = Limits(max_batch_size=1, max_seqlen=total, max_num_tokens=total)
        pool = MHATokenToKVPool(total, page_size, BF16, KV_HEADS, DIM, 1, DEVICE)
        order = torch.randperm(total // page_size, device=DEVICE).unsqueeze(1) * page_size
        slots = (order + torch.arange(page_size, device=DEVICE)).view(1, -1)
        layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
        k, v = torch.randn(2, total, KV_HEADS, DIM, device=DEVICE).to(BF16)
        times = []
        for parts, backend in (
            (1, select_backend(spec, limits, DEVICE)),
            (5, DualChunkFlashAttentionBackend(spec, limits, DEVICE, chunk_size=8192, local_size=1024)),
        ):
            batch = AttentionBatch(
                forward_mode=ForwardMode.EXTEND,
                req_pool_indices=torch.zeros(1, dtype=torch.int64, device=DEVICE),
                cache_seqlens=torch.tensor([total], dtype=I32, device=DEVICE),
                num_tokens=total,
                req_to_token=slots.int(),
                out_cache_loc=slots.flatten(),
                extend_seq_lens=torch.tensor([total], dtype=I32, device=DEVICE),
                token_to_kv_pool=pool,
                attn_backend=backend,
            )
            q = torch.randn(total, parts * HEADS * DIM, device=DEVICE).to(BF16)
            backend.init_forward_metadata(batch)
            named = {"tokens": total, "chunk_size": 8192, "local_size": 1024, "parts": parts}
            self.cell("dual chunk", "attnops", named, [partial(layer, q, k, v, batch)])
            times.append(self.records[-1].ms)
        print(f"{'':18s} dual chunks / causal {times[1] / times[0]:.3f}", flush=True)

    def loop(self) -> None:
        """All steps of a loop in one graph, beside as many decode steps."""
        for batch_size in (1, 32):
            for topk in (1, 4):
                steps = DraftSteps(batch_size, 4096, 64, topk, draft_steps=6)
                steps.prepare()
                self.cell("draft loop", "attnops", steps.params, [steps.run], note="5 steps with their metadata")
                self.cell("draft loop", "attnops", {**steps.params, "part": "attention"}, [steps.attend_all])
                attention = self.records[-1].ms
                decode = DraftSteps(batch_size, 4096, 64, 1, draft_steps=2)
                decode.prepare()
                params = {"batch_size": batch_size, "length": 4096, "steps": 5, "topk": topk}
                self.cell("draft loop", "five decodes", params, [lambda d=decode: [d.attend(0) for _ in range(5)]])
                print(f"{'':18s} loop / five decodes {attention / self.records[-1].ms:.3f}", flush=True)


class DraftSteps:
    """A draft loop of one layer over random pages."""

    def __init__(self, batch_size: int, length: int, page_size: int, topk: int, draft_steps: int = 6) -> None:
        self.params = {
            "batch_size": batch_size,
            "length": length,
            "page_size": page_size,
            "topk": topk,
            "draft_steps": draft_steps,
        }
        context = -(-(length + topk * 2 * max(page_size, draft_steps)) // page_size) * page_size
        spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page_size, dtype=BF16)
        limits = Limits(max_batch_size=batch_size, max_seqlen=context)
        self.loop = MultiStepDraftBackend(select_backend, spec, limits, DEVICE, topk=topk, draft_steps=draft_steps)
        self.pool = MHATokenToKVPool(batch_size * context, page_size, BF16, KV_HEADS, DIM, 1, DEVICE)
        for pages in (*self.pool.k_buffer, *self.pool.v_buffer):
            pages.normal_()
        order = torch.randperm(batch_size * context // page_size, device=DEVICE).view(batch_size, -1, 1)
        slots = (order * page_size + torch.arange(page_size, device=DEVICE)).flatten(1).int()
        self.layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
        self.batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.arange(batch_size, device=DEVICE),
            cache_seqlens=torch.full((batch_size,), length, dtype=I32, device=DEVICE),
            num_tokens=batch_size,
            req_to_token=slots,
            out_cache_loc=torch.zeros(batch_size, dtype=torch.int64, device=DEVICE),
            positions=torch.full((batch_size,), length - 1, device=DEVICE),
            token_to_kv_pool=self.pool,
            attn_backend=self.loop,
        )
        rows = batch_size * topk
        self.q = torch.randn(rows, HEADS, DIM, device=DEVICE).to(BF16)
        self.k, self.v = torch.randn(2, rows, KV_HEADS, DIM, device=DEVICE).to(BF16)
        self.count = draft_steps - 1

    def prepare(self) -> None:
        self.loop.init_forward_metadata(self.batch)

    def attend(self, index: int) -> None:
        self.layer(self.q, self.k, self.v, self.loop.step(index))

    def attend_all(self) -> None:
        for index in range(self.count):
            self.attend(index)

    def run(self) -> None:
        self.loop.init_forward_metadata_in_graph(self.batch)
        self.attend_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one replay of each cell")
    parser.add_argument("--parts", default="trees,moves,verify,draft,loop,cross,items,chunks", help="what to measure")
    parser.add_argument("--write", action="store_true", help="write the results")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    bench = SpeculationBench(rounds=1 if options.smoke else 15)
    for part in options.parts.split(","):
        getattr(bench, part)()
        torch.cuda.empty_cache()
    if options.write:
        write(bench.records, "h200-speculation", Path(options.out))


if __name__ == "__main__":
    main()
