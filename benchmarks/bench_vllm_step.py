"""A step of vLLM on a GPU, of attention alone: ATTNOPS beside vLLM's own backends, in one run, in turns.

Each side is vLLM's own classes, driven as its model runner drives them: the builder makes a step's metadata from one
`CommonAttentionMetadata`. Then a graph of all layers is replayed, or, where prompts are in the batch, the layers run
eagerly. Each layer stores its new rows and attends. Pages hold the same values, block tables are as wide as the
context, and results are compared before a time counts. A time is the median over turns of build and layers.

Without vLLM's compiled modules only sides in Triton can take part. One that cannot is named with its reason.

    PYTHONPATH=python python benchmarks/bench_vllm_step.py        # and --model mla
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import random
import statistics
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace

import records
import torch
from torch import Tensor

# Lengths of the requests that decode, then (length, new tokens) of those that bring prompts.
CELLS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "1 x 32768": ([32768], []),
    "64 x 8192": ([8192] * 64, []),
    "ragged 64": (sorted(random.Random(0).randint(256, 16384) for _ in range(64)), []),
    "8 x 1024": ([1024] * 8, []),
    "32 x 4096 and 2048 of 4096": ([4096] * 32, [(4096, 2048)]),
}
CONTEXT, MOST_REQUESTS = 131072, 256
BACKENDS = "vllm.v1.attention.backends"
SIDES = {
    "ATTNOPS": ("attnops.plugins.vllm.backend", "AttnopsBackend"),
    "FLASH_ATTN": (f"{BACKENDS}.flash_attn", "FlashAttentionBackend"),
    "TRITON_ATTN": (f"{BACKENDS}.triton_attn", "TritonAttentionBackend"),
    "ATTNOPS_MLA": ("attnops.plugins.vllm.mla", "AttnopsMLABackend"),
    "FLASH_ATTN_MLA": (f"{BACKENDS}.mla.flashattn_mla", "FlashAttnMLABackend"),
    "FLASHMLA": (f"{BACKENDS}.mla.flashmla", "FlashMLABackend"),
    "TRITON_MLA": (f"{BACKENDS}.mla.triton_mla", "TritonMLABackend"),
}
OF_MODEL = {"gqa": ("ATTNOPS", "FLASH_ATTN", "TRITON_ATTN")}
OF_MODEL["mla"] = ("ATTNOPS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")  # the second: vLLM's default on Hopper
LATENT, ROPE = 512, 64
DEVICE = "cuda"
MLA = {
    "q_lora_rank": 1536,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 128,
}


def config(options: argparse.Namespace) -> SimpleNamespace:
    """What builders read of vLLM's configuration."""
    from vllm.config import CUDAGraphMode, VllmConfig

    whole, sizes = VllmConfig(), [1, 2, 4, 8, 16, 32, 64, 128, MOST_REQUESTS]
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=CONTEXT,
        rswa_window=None,
        is_mm_prefix_lm=False,
        is_diffusion=False,
        hf_config=SimpleNamespace(model_type="llama"),
        get_num_attention_heads=lambda parallel: options.heads[0],
        get_num_kv_heads=lambda parallel: options.heads[1],
        get_head_size=lambda: options.head_dim,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        static_forward_context={},
    )
    return SimpleNamespace(
        model_config=model,
        compilation_config=compilation,
        parallel_config=whole.parallel_config,
        scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=8192),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=options.block),
        attention_config=whole.attention_config,
        kernel_config=whole.kernel_config,
        speculative_config=None,
        kv_transfer_config=None,
    )


def layer_module(options: argparse.Namespace, impl: object) -> torch.nn.Module:
    """What builders ask of a layer."""
    from vllm.model_executor.layers.attention import Attention

    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl = impl
    if options.model == "mla":
        layer.__dict__ |= MLA | {"prefill_backend": SimpleNamespace(clone=lambda: None)}
    return layer


class Side:
    """A backend of vLLM over shared caches: its builder, its layers, and their graph."""

    def __init__(self, name: str, options: argparse.Namespace, batch: SimpleNamespace, caches: list[Tensor]) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        module, cls = SIDES[name]
        backend = getattr(importlib.import_module(module), cls)
        q_heads, kv_heads = options.heads
        self.batch, self.caches, self.is_mla = batch, caches, options.model == "mla"
        given = (q_heads, options.head_dim, options.scale, kv_heads, None, None, "auto")
        more = {}
        if self.is_mla:
            given, more = (*given, None, "decoder", None), MLA | {"qk_head_dim": 128 + ROPE, "kv_b_proj": None}
        self.stores = backend.forward_includes_kv_cache_update
        self.impls = [backend.get_impl_cls()(*given, **more) for _ in caches]
        for impl in self.impls:
            impl.need_to_return_lse_for_decode = False  # as without context parallelism
        whole, names = config(options), [f"layers.{i}" for i in range(len(caches))]
        for layer_name, impl in zip(names, self.impls, strict=True):
            whole.compilation_config.static_forward_context[layer_name] = layer_module(options, impl)
        kind = MLAAttentionSpec if self.is_mla else FullAttentionSpec
        spec = kind(block_size=options.block, num_kv_heads=kv_heads, head_size=options.head_dim, dtype=torch.bfloat16)
        self.builder = backend.get_builder_cls()(spec, names, whole, batch.lens.device)
        ones = torch.ones((), device=batch.lens.device)
        self.layer = SimpleNamespace(
            _k_scale=ones, _v_scale=ones, _q_scale=ones, _k_scale_float=1.0, _v_scale_float=1.0
        )
        self.out = [] if self.is_mla else [torch.empty_like(batch.q) for _ in caches]
        self.graph: torch.cuda.CUDAGraph | None = None

    def build(self) -> object:
        return self.builder.build(0, self.batch.common)

    def layers(self, metadata: object) -> None:
        b = self.batch
        if self.is_mla:
            self.out = []
            for impl, cache in zip(self.impls, self.caches, strict=True):
                impl.do_kv_cache_update(b.k, b.v, cache, b.slots, "auto", self.layer._k_scale)
                self.out.append(impl.forward_mqa(b.q, cache, metadata, self.layer)[0])
            return
        for impl, cache, out in zip(self.impls, self.caches, self.out, strict=True):
            if not self.stores:
                impl.do_kv_cache_update(self.layer, b.k, b.v, cache, b.slots)
            impl.forward(self.layer, b.q, b.k, b.v, cache, metadata, out)

    def capture(self) -> None:
        self.layers(self.build())
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # vLLM captures for the longest requests that there may be.
        longest = dataclasses.replace(self.batch.common, max_seq_len=CONTEXT)
        metadata = self.builder.build_for_cudagraph_capture(longest)
        self.batch.lens.copy_(self.batch.lens_cpu)  # TRITON_ATTN writes ones for its capture
        with torch.cuda.graph(self.graph):
            self.layers(metadata)

    def step(self) -> None:
        metadata = self.build()
        if self.graph is None:
            self.layers(metadata)
        else:
            self.graph.replay()


def problem(decodes: list[int], prompts: list[tuple[int, int]], options: argparse.Namespace) -> SimpleNamespace:
    """The tensors that vLLM's runner brings to a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    torch.manual_seed(0)
    lengths = decodes + [length for length, _ in prompts]
    new_tokens = [1] * len(decodes) + [new for _, new in prompts]
    size, tokens, block = len(lengths), sum(new_tokens), options.block
    lens_cpu = torch.tensor(lengths, dtype=torch.int32)
    blocks = -(-max(lengths) // block)
    table = torch.zeros(size, CONTEXT // block, dtype=torch.int32)
    table[:, :blocks] = torch.randperm(size * blocks).to(torch.int32).view(size, blocks)
    places = [torch.arange(length - new, length) for length, new in zip(lengths, new_tokens, strict=True)]
    slots = torch.cat([row[at // block].long() * block + at % block for row, at in zip(table, places, strict=True)])
    heads, kv_heads = options.heads
    if options.model == "mla":
        # As vLLM brings them: absorbed queries are a product's transposed view, their rotated part is a slice.
        q = (normal(heads, tokens, LATENT).transpose(0, 1), normal(tokens, heads, 128 + ROPE)[..., 128:])
        k, v = normal(tokens, LATENT), normal(tokens, 1, ROPE)
    else:
        q, k, v = (normal(tokens, n, options.head_dim) for n in (heads, kv_heads, kv_heads))
    starts = torch.tensor([0, *new_tokens]).cumsum(0).int()
    lens, table, slots = lens_cpu.to(DEVICE), table.to(DEVICE), slots.to(DEVICE)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=size,
        num_actual_tokens=tokens,
        max_query_len=max(new_tokens),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
    )
    return SimpleNamespace(
        lens=lens, lens_cpu=lens_cpu, slots=slots, q=q, k=k, v=v, common=common, blocks=size * blocks
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def measure(cell: str, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of each side, and how far each result is from attnops'."""
    decodes, prompts = CELLS[cell]
    batch = problem(decodes, prompts, options)
    shape = (batch.blocks, options.block, options.heads[1], 2 * options.head_dim)
    if options.model == "mla":
        shape = (batch.blocks, options.block, options.head_dim)
    first = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    caches = [first, *(first.clone() for _ in range(options.layers - 1))]
    if options.model == "gqa":
        # Logically [blocks, heads, tokens, 2 D], in memory tokens first: vLLM's default on a GPU.
        caches = [cache.transpose(1, 2) for cache in caches]
    sides, errors, ours = {}, {}, None
    for name in options.sides:
        try:
            side = Side(name, options, batch, caches)
            if not prompts:
                side.capture()
            side.step()
            torch.cuda.synchronize()
            result = side.out[-1].float()
            ours = result if ours is None else ours
            errors[name] = float((ours - result).norm() / result.norm())
            if not errors[name] < 2e-2:
                raise ValueError(f"its result differs by {errors[name]:.3g}")
        except Exception as error:
            if name == options.sides[0] or "CUDA error" in str(error):
                raise
            print(f"{cell:<28} {name} takes no part: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        sides[name] = side
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.turns):
        for name, side in sides.items():
            times[name].append(microseconds(side.step, options.steps))
    return {name: statistics.median(values) for name, values in times.items()}, errors


def microseconds(step: Callable[[], None], steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(OF_MODEL), default="gqa")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), help="attnops' first")
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS), default=list(CELLS))
    parser.add_argument("--heads", type=int, nargs=2, help="32 8; of MLA 16 1")
    parser.add_argument("--head-dim", type=int, default=128, help="of MLA 576")
    parser.add_argument("--block", type=int, help="tokens of a block: 16; of MLA 64")
    parser.add_argument("--layers", type=int, default=8, help="each with a cache of its own")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="results/h200-vllm.jsonl")
    options = parser.parse_args()
    is_mla = options.model == "mla"
    options.sides = options.sides or list(OF_MODEL[options.model])
    options.heads = tuple(options.heads or ((16, 1) if is_mla else (32, 8)))
    options.block = options.block or (64 if is_mla else 16)
    options.head_dim = LATENT + ROPE if is_mla else options.head_dim
    options.scale = ((128 + ROPE) if is_mla else options.head_dim) ** -0.5
    from vllm.config import VllmConfig, set_current_vllm_config

    kept, case = [], "vLLM step" + (" mla" if is_mla else "")
    with torch.inference_mode(), set_current_vllm_config(VllmConfig()):
        for cell in options.cells:
            if is_mla and CELLS[cell][1]:
                continue  # prompts of MLA are vLLM's own
            times, errors = measure(cell, options)
            best = times[options.sides[0]]
            shown = "  ".join(f"{name} {us:.1f} us {us / best:.3f}x" for name, us in times.items())
            print(f"{cell:<28} {options.layers} layers  {shown}", flush=True)
            shape = {"step": cell, "layers": options.layers, "heads": options.heads, "head_dim": options.head_dim}
            note = f"blocks of {options.block}, context {CONTEXT}, " + (
                "layers eager" if CELLS[cell][1] else "layers in a graph"
            )
            for name, us in times.items():
                ours = name.startswith("ATTNOPS")
                peer, release = ("attnops", "") if ours else (f"vLLM {name}", version("vllm"))
                error = max(errors.values()) if ours else errors[name]
                kept.append(records.Record(case, peer, shape, us / 1e3, release, rel_err=error, note=note))
            torch.cuda.empty_cache()
    if options.write:
        print(records.write(kept, "h200-vllm"))


if __name__ == "__main__":
    main()
