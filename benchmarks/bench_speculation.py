"""What stands around attention in speculative decoding on a GPU, and steps of its kinds beside plain ones.

A cell is a captured graph of many calls, its median over replays, by call; what is compared is replayed in turns.
SGLang's kernels are measured beside ours where they are found (speculation_peers.py). Rows are written after each cell,
and a part that fails is named at the end, behind every bar of the issue: what was measured, and what was not.

    python benchmarks/bench_speculation.py --write             # all parts, below 100 s of one H200
    python benchmarks/bench_speculation.py --parts trees,moves,verify,draft,loop,cross,items,chunks --write
"""

from __future__ import annotations

import argparse
import itertools
import random
from functools import partial
from pathlib import Path

import speculation_peers as peers
import torch
from attnops import ops
from attnops.backends import AttentionBackend, DualChunkFlashAttentionBackend, EncoderDecoderBackend, select_backend
from attnops.layers import RadixAttention
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from attnops.ops.speculation import DraftTree, TreeMaskMode, Verified
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits, MultiItemScoringParams
from records import RESULTS
from speculation_problems import BF16, DIM, HEADS, I32, KV_HEADS, DraftSteps, draft_loop, random_tree
from turns import Calls, Contender, Turns

DEVICE = "cuda"
CALLS = 20
PARTS = ("trees", "moves", "verify", "draft", "loop", "cross", "items", "chunks")
# What a run of all parts tells; SGLang's kernels besides, where they are found.
BARS = (
    "build and verify, us",
    "move_kv, us",
    *(f"tree / causal, {heads}, N {nodes}" for nodes in (8, 16) for heads in ("32/8 heads", "16 MLA heads")),
    *(f"draft step, topk 4 / topk 1, page {size}" for size in (64, 1)),
    *(f"draft step, page 1 / page 64, topk {topk}" for topk in (1, 4)),
    *(f"loop of 5 / five decodes, B {size}, topk {topk}" for size in (1, 32) for topk in (1, 4)),
    *(f"cross attention / xqa_decode, page {size}" for size in (64, 1)),
    "items / causal",
    "dual chunks / causal",
)


def ours(params: dict, calls: Calls, num_bytes: int | None = None, note: str = "") -> Contender:
    return Contender("attnops", params, calls, num_bytes, note)


def prompt_of(
    total: int, slots: torch.Tensor, pool: MHATokenToKVPool, backend: AttentionBackend, **options: object
) -> AttentionBatch:
    """One request of `total` tokens, all of them new."""
    return AttentionBatch(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        cache_seqlens=torch.tensor([total], dtype=I32, device=DEVICE),
        num_tokens=total,
        req_to_token=slots.int(),
        out_cache_loc=slots.flatten(),
        extend_seq_lens=torch.tensor([total], dtype=I32, device=DEVICE),
        token_to_kv_pool=pool,
        attn_backend=backend,
        **options,
    )


class SpeculationBench(Turns):
    def trees(self, sizes=((64, 16), (1, 16), (64, 64)), vocabulary=32_000) -> None:
        kernels = peers.kernels_of_trees()
        for batch_size, num_tokens in sizes:
            given = draft_loop(batch_size, num_tokens, 4, 5, DEVICE)
            params = {"batch_size": batch_size, "num_tokens": num_tokens, "topk": 4, "draft_steps": 5}
            tree = DraftTree.allocate(batch_size, num_tokens, DEVICE)
            out = Verified.allocate(batch_size, num_tokens, 6, DEVICE)
            target = torch.randint(0, 3, (batch_size * num_tokens,), device=DEVICE)
            nodes = (tree.tokens.view(batch_size, -1), *tree[2:5])
            build = partial(ops.build_draft_tree, **given, out=tree)
            greedy = partial(ops.verify_tree_greedy, *nodes, target, out=out)
            self.trees_of_all(params, (build, greedy), kernels, given, target, (tree, out))
            probs = torch.rand(batch_size, num_tokens, vocabulary, device=DEVICE).softmax(-1)
            coins = torch.rand(batch_size, num_tokens, device=DEVICE)
            sampling = partial(ops.verify_tree_sampling, *nodes, coins, coins[:, 0].contiguous(), probs, out=out)
            self.cell("verify_tree_sampling", ours({**params, "vocabulary": vocabulary}, [sampling] * CALLS))
            whole = torch.ones(batch_size, num_tokens, num_tokens, dtype=torch.bool, device=DEVICE).tril().flatten()
            packed = torch.empty_like(tree.tree_mask)
            pack = partial(ops.pack_tree_mask, whole, num_tokens, TreeMaskMode.QLEN_ONLY, tree_mask=packed)
            self.cell("pack_tree_mask", ours(params, [pack] * CALLS))

    def trees_of_all(self, params: dict, mine: tuple, kernels: dict, given: dict, target, results: tuple) -> None:
        """Both ops and what is found of SGLang's, in turns; SGLang's callers fill the links, which counts for both."""
        build, greedy = mine
        build()
        greedy()
        theirs = {}
        for name, two in kernels.items():
            try:
                one = peers.Trees(two, given, params["draft_steps"], target, results)
                theirs[name] = (one, one.says())
            except Exception as error:
                print(f"left out: trees of {name}: {str(error)[:200]!r}", flush=True)
        for case, mine_calls, attribute in (
            ("build_draft_tree", [build] * CALLS, "build_alone"),
            ("verify_tree_greedy", [greedy] * CALLS, "verify"),
            ("build and verify", [lambda: (build(), greedy())] * CALLS, "both"),
        ):
            others = []
            for name, (one, says) in theirs.items():
                one.both()  # links are read, whatever the cell before left there
                others.append(Contender(name, params, [getattr(one, attribute)] * CALLS, note=says))
            times = self.beside(case, ours(params, mine_calls), *others)
            if (params["batch_size"], params["num_tokens"]) != (64, 16):  # what the bars are for
                continue
            if attribute == "both":
                self.bar("build and verify, us", times[0] * 1e3, 12.0)
            for other, ms in zip(others, times[1:]):
                self.bar(f"{case} / {other.peer}", times[0] / ms, 1.0)

    def moves(self, layers=32, batch_size=64, nodes=16, page_size=64) -> None:
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
            targets = loc.view(batch_size, nodes)[:, 1:6].flatten()
            moved = 2 * batch_size * 5 * buffers * row
            other = self.peer(params, moved, peers.moves, pages, targets, loc[accepted[:, 1:]].flatten())
            times = self.beside("move_kv", ours(params, [call] * CALLS, moved, "one launch"), *other)
            if dtype == BF16 and buffers == 2 * layers:
                self.bar("move_kv, us", times[0] * 1e3, 30.0)
        self.slots(batch_size, page_size)

    def slots(self, batch_size: int, page_size: int) -> None:
        table = torch.randint(0, 2**20, (batch_size, 8192), dtype=I32, device=DEVICE)
        given = (table, torch.arange(batch_size, device=DEVICE))
        lengths = torch.full((batch_size,), 4096 + 37, dtype=I32, device=DEVICE)
        like = (
            torch.zeros(5, batch_size * 4 + 1, dtype=I32, device=DEVICE),
            torch.zeros(5, batch_size * 4 * 4200, dtype=I32, device=DEVICE),
        )
        params = {"batch_size": batch_size, "length": 4133, "topk": 4, "draft_steps": 5, "page_size": page_size}
        call = partial(
            ops.generate_draft_decode_kv_indices,
            *given,
            lengths,
            4,
            5,
            page_size,
            kv_indptr=like[0],
            kv_indices=like[1],
        )  # fmt: skip
        call()
        other = self.peer(params, None, peers.indices, *given, lengths, 4, 5, page_size, like)
        self.beside("generate_draft_decode_kv_indices", ours(params, [call] * CALLS), *other)
        cells = torch.arange(batch_size * 8192, dtype=I32, device=DEVICE).view(batch_size, -1)
        pages = [
            torch.zeros(batch_size * 8192 // page_size, page_size, 1, DIM, dtype=BF16, device=DEVICE) for _ in range(2)
        ]
        call = partial(ops.copy_page_tail, cells, given[1], lengths, pages, 4, 5)
        self.cell("copy_page_tail", ours({**params, "layers": 1, "num_kv_heads": 1}, [call] * CALLS))

    def peer(self, params: dict, num_bytes: int | None, make, *given) -> list[Contender]:
        """What `make` finds, in a cell of so many calls; nothing where it fails."""
        try:
            found = make(*given)
        except Exception as error:
            print(f"left out: {make.__name__} of SGLang: {str(error)[:200]!r}", flush=True)
            return []
        if found is None:
            return []
        return [Contender(found.peer, params, list(found.calls) * CALLS, num_bytes, found.note)]

    def verify(self, batch_size=64, length=4096, page_size=64) -> None:
        """Tree masks beside causal ones: the same queries, keys and plan."""
        count = batch_size * length // page_size
        table = torch.randperm(count, device=DEVICE).to(I32).view(batch_size, -1)
        lengths = torch.full((batch_size,), length, dtype=I32, device=DEVICE)
        pages = [torch.randn(count, page_size, KV_HEADS, DIM, device=DEVICE).to(BF16) for _ in range(2)]
        latents = torch.randn(count, page_size, 576, device=DEVICE).to(BF16)
        for num_tokens in (8, 16):
            mask = random_tree(batch_size, num_tokens, DEVICE)
            shape = {"batch_size": batch_size, "length": length, "s_q": num_tokens, "page_size": page_size}
            q = torch.randn(batch_size, num_tokens, HEADS, DIM, device=DEVICE).to(BF16)
            heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
            plan = XqaDecodePlan.allocate(
                batch_size, **heads, seqlen_q=num_tokens, max_seqlen_k=length, kv_dtype=BF16, device=DEVICE
            )
            ops.xqa_decode_plan(plan, lengths)
            step = partial(ops.xqa_decode, q, *pages, table, lengths, plan, out=torch.empty_like(q))
            self.tree_beside_causal(f"32/8 heads, N {num_tokens}", {**shape, **heads}, step, mask)
            q = torch.randn(batch_size, num_tokens, 16, 576, device=DEVICE).to(BF16)
            plan = MlaDecodePlan.allocate(batch_size, num_q_heads=16, seqlen_q=num_tokens, device=DEVICE)
            ops.mla_decode_plan(plan, lengths)
            out = torch.empty(*q.shape[:-1], 512, dtype=BF16, device=DEVICE)
            step = partial(ops.mla_decode, q, latents, table, lengths, plan, softmax_scale=0.1, out=out)
            self.tree_beside_causal(f"16 MLA heads, N {num_tokens}", {**shape, "heads": "16 of MLA"}, step, mask)

    def tree_beside_causal(self, name: str, params: dict, step, mask) -> None:
        times = self.cell(
            "verify",
            ours({**params, "mask": "causal"}, [step] * 5),
            ours({**params, "mask": "tree"}, [partial(step, tree_mask=mask)] * 5),
        )
        self.bar(f"tree / causal, {name}", times[1] / times[0], 1.10)

    def draft(self, batch_size=64, length=4096) -> None:
        """The third of five steps, attention alone: 4 branches beside 1, pages of 64 beside pages of 1."""
        kinds, cells, kept = [(64, 1), (64, 4), (1, 1), (1, 4)], [], []
        for page_size, topk in kinds:
            step = DraftSteps(batch_size, length, page_size, topk, DEVICE)
            step.prepare()
            kept.append(step)
            cells.append(ours(step.params, [partial(step.attend, 2)] * 5))
        times = dict(zip(kinds, self.cell("draft step", *cells)))
        for page_size in (64, 1):
            ratio = times[page_size, 4] / times[page_size, 1]
            self.bar(f"draft step, topk 4 / topk 1, page {page_size}", ratio, 1.15)
        for topk in (1, 4):
            self.bar(f"draft step, page 1 / page 64, topk {topk}", times[1, topk] / times[64, topk], 1.06)
        self.stages(batch_size, length)
        self.windows(batch_size, length)

    def stages(self, batch_size: int, length: int) -> None:
        """The same with K and V of two head dims: one branch, 4 in two stages, 4 as requests."""
        cells, kept = [], []
        for topk, trees in ((1, True), (4, True), (4, False)):
            step = DraftSteps(batch_size, length, 64, topk, DEVICE, dims=(192, 128), trees=trees)
            step.prepare()
            kept.append(step)
            params = {**step.params, "head_dim": 192, "v_head_dim": 128, "shares_prefix": step.loop.has_trees}
            cells.append(ours(params, [partial(step.attend, 2)] * 5))
        one, shared, apart = self.cell("draft step, two head dims", *cells)
        print(f"{'':18s} topk 4 / topk 1 {shared / one:.3f}, as requests {apart / one:.3f}", flush=True)

    def windows(self, batch_size: int, length: int, sizes=(127, 1023)) -> None:
        """The same with a window, and loops with their metadata: one branch, 4 in one request, 4 as requests."""
        for requests, window in itertools.product(sorted({1, batch_size}), sizes):
            cells = []
            for topk, trees in ((1, True), (4, True), (4, False)):
                step = DraftSteps(requests, length, 64, topk, DEVICE, trees=trees, window=window)
                step.prepare()
                params = {**step.params, "window": window, "shares_prefix": step.loop.has_trees}
                cells.append(ours(params, [partial(step.attend, 2)] * 5))
                cells.append(ours({**params, "part": "loop with its metadata"}, [step.run]))
            times = self.cell("draft step, window", *cells)
            shared, apart = ([times[i + j] / times[j] for j in range(2)] for i in (2, 4))
            print(
                f"{'':18s} topk 4 / topk 1 {shared[0]:.3f}, as requests {apart[0]:.3f}; loops {shared[1]:.3f} and "
                f"{apart[1]:.3f}",
                flush=True,
            )

    def loop(self, sizes=(1, 32), length=4096) -> None:
        """All steps of a loop in one graph, beside as many decode steps."""
        for batch_size in sizes:
            decode = DraftSteps(batch_size, length, 64, 1, DEVICE, draft_steps=2)
            decode.prepare()

            def decodes(decode=decode) -> None:
                for _ in range(5):
                    decode.attend(0)

            for topk in (1, 4):
                steps = DraftSteps(batch_size, length, 64, topk, DEVICE, draft_steps=6)
                steps.prepare()
                params = {**steps.params, "part": "attention"}
                times = self.cell(
                    "draft loop",
                    ours(steps.params, [steps.run], note="5 steps with their metadata: one graph, one launch of it"),
                    Contender("five decodes", params, [decodes]),
                    ours(params, [steps.attend_all]),
                )
                self.bar(f"loop of 5 / five decodes, B {batch_size}, topk {topk}", times[2] / times[1], 1.05)

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
            heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
            plan = XqaDecodePlan.allocate(batch_size, **heads, max_seqlen_k=length, kv_dtype=BF16, device=DEVICE)
            ops.xqa_decode_plan(plan, encoder_lens)
            table, by_token = pages.int(), q.unsqueeze(1)
            keys = pool.get_kv_buffer(0)
            call = partial(ops.xqa_decode, by_token, *keys, table, encoder_lens, plan, out=torch.empty_like(by_token))
            times = self.cell(
                "cross attention",
                Contender("xqa_decode", params, [call] * CALLS),
                ours(params, [partial(layer, q, None, None, batch)] * CALLS),
            )
            self.bar(f"cross attention / xqa_decode, page {page_size}", times[1] / times[0], 1.0)

    def items(self, prefix=2048, items=64, length=32, page_size=64) -> None:
        """A prompt of a prefix and items, beside a causal prefill of as many tokens."""
        total = prefix + items * length
        spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page_size, dtype=BF16)
        limits = Limits(max_batch_size=1, max_seqlen=total, max_num_tokens=total)
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
        cells = []
        for kind in (None, params):
            backend = select_backend(spec, limits, DEVICE)  # of its own: steps in turns must not share a plan
            batch = prompt_of(total, slots, pool, backend, multi_item=kind)
            backend.init_forward_metadata(batch)
            named = {"prefix": prefix, "items": items, "item_tokens": length, "mask": "items" if kind else "causal"}
            cells.append(ours(named, [partial(layer, q, k, v, batch)] * 4))
        times = self.cell("multi-item", *cells)
        self.bar("items / causal", times[1] / times[0], 0.85)

    def chunks(self, total=65_536, page_size=64, chunk_size=8192, local_size=1024) -> None:
        """A prefill in dual chunks, beside a causal one: both see the same keys."""
        spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page_size, dtype=BF16)
        limits = Limits(max_batch_size=1, max_seqlen=total, max_num_tokens=total)
        pool = MHATokenToKVPool(total, page_size, BF16, KV_HEADS, DIM, 1, DEVICE)
        order = torch.randperm(total // page_size, device=DEVICE).unsqueeze(1) * page_size
        slots = (order + torch.arange(page_size, device=DEVICE)).view(1, -1)
        layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
        k, v = torch.randn(2, total, KV_HEADS, DIM, device=DEVICE).to(BF16)
        cells, sizes = [], {"chunk_size": chunk_size, "local_size": local_size}
        for parts, backend in (
            (1, select_backend(spec, limits, DEVICE)),
            (5, DualChunkFlashAttentionBackend(spec, limits, DEVICE, **sizes)),
        ):
            batch = prompt_of(total, slots, pool, backend)
            q = torch.randn(total, parts * HEADS * DIM, device=DEVICE).to(BF16)
            backend.init_forward_metadata(batch)
            named = {"tokens": total, **sizes, "parts": parts}
            cells.append(ours(named, [partial(layer, q, k, v, batch)]))
        times = self.cell("dual chunk", *cells)
        self.bar("dual chunks / causal", times[1] / times[0], 1.15)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one replay of each cell")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no part later than this")
    parser.add_argument("--write", action="store_true", help="write the results, after each cell")
    parser.add_argument("--out", default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    chosen = options.parts.split(",")
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        parser.error(f"--parts takes {', '.join(PARTS)}, got {', '.join(unknown)}")
    folder = Path(options.out) if options.write else None
    bench = SpeculationBench("h200-speculation", 1 if options.smoke else 15, folder, options.seconds)
    for part in chosen:
        bench.part(part, getattr(bench, part))
    return bench.end(BARS)


if __name__ == "__main__":
    raise SystemExit(main())
