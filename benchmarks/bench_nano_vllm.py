"""nano-vllm, a whole engine, unmodified, on `attnops.compat.flash_attn` and on FlashAttention-3, in turns, on one GPU.

The engine imports `flash_attn`; here that is a module whose two functions change from turn to turn. Then the engine
gets an empty prefix cache and captures its decode graphs anew. The model has the shape of Qwen3 0.6B or 8B, and random
weights. Tokens per second are measured with the engine's own sampler. With a greedy sampler put in its place, the
tokens of both sides are compared, from prompts and then from the prefix cache.

    PYTHONPATH=python python benchmarks/bench_nano_vllm.py CHECKOUT --requests 256
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import statistics
import sys
import tempfile
import time
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import records
import torch

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "bfloat16",
}
LARGER = {  # the 8B model, where it differs
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}


def flash_attention_3() -> tuple:
    """sglang-kernel's, by the arguments that nano-vllm gives. Where it is not installed, vLLM's."""
    try:
        from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError:
        return flash_attention_3_of_vllm()

    def varlen(q, k, v, *, block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        if block_table is None:
            return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
        lens = cu_seqlens_k.diff()
        paged = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "page_table": block_table}
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, **paged, **options)

    def kvcache(q, k_cache, v_cache, *, block_table, **options):
        return flash_attn_with_kvcache(q, k_cache, v_cache, page_table=block_table, **options)

    return varlen, kvcache


def flash_attention_3_of_vllm() -> tuple:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    starts = torch.arange(1025, dtype=torch.int32, device="cuda")

    def varlen(q, k, v, *, block_table, cu_seqlens_k, **options):
        keys = {"cu_seqlens_k": cu_seqlens_k}
        if block_table is not None:
            keys = {"seqused_k": cu_seqlens_k.diff(), "block_table": block_table}
        return flash_attn_varlen_func(q, k, v, fa_version=3, **keys, **options)

    def kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, **options):
        longest = block_table.shape[1] * k_cache.shape[1]
        queries = {"cu_seqlens_q": starts[: q.shape[0] + 1], "max_seqlen_q": 1, "max_seqlen_k": longest}
        paged = {"seqused_k": cache_seqlens, "block_table": block_table}
        rows = flash_attn_varlen_func(q.squeeze(1), k_cache, v_cache, fa_version=3, **queries, **paged, **options)
        return rows.unsqueeze(1)

    return varlen, kvcache


def attnops() -> tuple:
    from attnops.compat import flash_attn

    return flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache


class Greedy:
    """In place of the engine's sampler: the best token, and how far ahead of the second it is, over its own size."""

    def __init__(self) -> None:
        self.leads: list[list[float]] = []

    def __call__(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        best = logits.float().topk(2, dim=-1)
        self.leads.append(((best.values[:, 0] - best.values[:, 1]) / best.values[:, 0].abs()).tolist())
        return best.indices[:, 0]


def fill(model: torch.nn.Module) -> None:
    """Random weights: norms of one, matrices that keep a row's size.

    The head's rows are the embeddings in another order. So most tokens have a favourite successor, as in a trained
    model. With independent rows all leads would be within a rounding.
    """
    embedding = model.model.embed_tokens.weight
    generator = torch.Generator(embedding.device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1)
            elif "lm_head" not in name:
                weight.normal_(std=1.0 if "embed" in name else weight.shape[1] ** -0.5, generator=generator)
        order = torch.randperm(embedding.shape[0], generator=generator, device=embedding.device)
        model.lm_head.weight.copy_(embedding[order])


def take(engine, chosen: dict, functions: tuple) -> None:
    """Another side behind the import: an empty prefix cache, and decode graphs of its functions."""
    runner = engine.model_runner
    chosen["varlen"], chosen["kvcache"] = functions
    engine.scheduler = type(engine.scheduler)(runner.config)
    if runner.enforce_eager:
        return
    runner.graphs.clear()
    dtype = torch.get_default_dtype()
    torch.set_default_device("cuda")
    torch.set_default_dtype(runner.config.hf_config.dtype)
    runner.capture_cudagraph()
    torch.set_default_device("cpu")
    torch.set_default_dtype(dtype)


def greedy_tokens(
    engine, prompts: list[list[int]], count: int, parameters
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of each request, and the lead of each."""
    runner, greedy = engine.model_runner, Greedy()
    sampler, run, order = runner.sampler, runner.run, []

    def noted(seqs, is_prefill):
        order.append([seq.seq_id for seq in seqs])
        return run(seqs, is_prefill)

    runner.sampler, runner.run = greedy, noted
    made = engine.generate(prompts, parameters(temperature=1.0, max_tokens=count, ignore_eos=True), use_tqdm=False)
    runner.sampler = sampler
    del runner.run
    leads: dict[int, list[float]] = {}
    for ids, row in zip(order, greedy.leads, strict=True):
        for request, lead in zip(ids, row, strict=True):
            leads.setdefault(request, []).append(lead)
    # A prompt that came in pieces has a token for each; the last ones count.
    return [request["token_ids"] for request in made], [leads[i][-count:] for i in sorted(leads)]


def compare(ours: tuple, theirs: tuple) -> dict:
    """Requests that agree to their end. At each first difference: request, place, and the smaller lead of the two."""
    whole, ties = 0, []
    for request, (a, b, lead_a, lead_b) in enumerate(zip(ours[0], theirs[0], ours[1], theirs[1], strict=True)):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        whole += first is None
        if first is not None:
            ties.append((round(min(lead_a[first], lead_b[first]), 5), request, first))
    return {
        "requests": len(ours[0]),
        "equal to the end": whole,
        "median lead of all tokens": round(statistics.median(x for row in ours[1] for x in row), 4),
        "distinct tokens": len({token for row in ours[0] for token in row}),
        "first differences (lead, request, place)": sorted(ties, reverse=True),
    }


def engine_version() -> str:
    try:
        return version("nano-vllm")
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="nano-vllm's folder")
    parser.add_argument("--shape", choices=("0.6B", "8B"), default="0.6B", help="of Qwen3")
    parser.add_argument("--layers", type=int, help="fewer than the model has: to see that it runs")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most-input", type=int, default=1024)
    parser.add_argument("--most-output", type=int, default=256)
    parser.add_argument("--greedy-tokens", type=int, default=64, help="of a request, to compare; 0: none")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that the engine may take")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument("--seconds", type=float, default=600, help="no further turn begins after that")
    parser.add_argument("--eager", action="store_true", help="no decode graphs")
    parser.add_argument("--write", action="store_true", help="results/h200-nano-vllm.jsonl")
    options = parser.parse_args()
    start = time.perf_counter()
    sides = {"attnops": attnops(), "fa3": flash_attention_3()}
    chosen = dict(zip(("varlen", "kvcache"), sides["attnops"], strict=True))
    shim = types.ModuleType("flash_attn")
    shim.flash_attn_varlen_func = lambda *args, **given: chosen["varlen"](*args, **given)
    shim.flash_attn_with_kvcache = lambda *args, **given: chosen["kvcache"](*args, **given)
    sys.modules["flash_attn"] = shim
    sys.path.insert(0, options.checkout)
    import transformers

    tokenizer = types.SimpleNamespace(eos_token_id=-1, decode=lambda ids: "", encode=lambda text: [1, 2, 3])
    transformers.AutoTokenizer.from_pretrained = lambda *args, **given: tokenizer
    from nanovllm import LLM, SamplingParams

    config = CONFIG | (LARGER if options.shape == "8B" else {})
    config |= {"num_hidden_layers": options.layers or config["num_hidden_layers"]}
    random.seed(0)
    draw = [
        (random.randint(100, options.most_input), random.randint(32, options.most_output))
        for _ in range(options.requests)
    ]
    prompts = [[random.randint(0, 10000) for _ in range(n)] for n, _ in draw]
    lengths = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for _, n in draw]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = LLM(
            folder,
            enforce_eager=options.eager,
            max_model_len=4096,
            max_num_seqs=options.requests,
            gpu_memory_utilization=options.memory,
        )
    fill(engine.model_runner.model)
    print(f"the engine is ready after {time.perf_counter() - start:.1f} s", flush=True)
    if options.greedy_tokens:
        greedy: dict[str, list[tuple]] = {}
        for name, functions in sides.items():
            take(engine, chosen, functions)
            given = (engine, prompts, options.greedy_tokens, SamplingParams)
            greedy[name] = [greedy_tokens(*given), greedy_tokens(*given)]  # the second one from the prefix cache
        for source, ours, theirs in zip(("prompts", "prefix cache"), *greedy.values(), strict=True):
            print(f"{options.shape}, from {source}: {json.dumps(compare(ours, theirs))}", flush=True)
    total = sum(n for _, n in draw)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # The engine compiles its sampler and norms for new batch sizes: not in the first side's time.
    take(engine, chosen, sides["fa3"])
    engine.generate(prompts, lengths, use_tqdm=False)
    for turn in range(options.turns):
        if turn and time.perf_counter() - start > options.seconds:
            break
        for name, functions in sides.items():
            take(engine, chosen, functions)
            engine.generate(prompts[:8], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            take_anew = type(engine.scheduler)(engine.model_runner.config)
            engine.scheduler = take_anew
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.generate(prompts, lengths, use_tqdm=False)
            seconds[name].append(time.perf_counter() - begin)
            print(f"turn {turn} {name}: {total / seconds[name][-1]:.0f} tokens/s", flush=True)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rates = ", ".join(f"{name} {total / value:.0f} tokens/s" for name, value in median.items())
    print(f"{options.shape}: {rates}, {median['fa3'] / median['attnops']:.3f}x ({total} tokens)", flush=True)
    if options.write:
        params = {"shape": options.shape, "requests": options.requests, "tokens": total}
        note = f"whole engine, its graphs and sampler; ms for all requests; nano-vllm {engine_version()}".rstrip()
        names = {"attnops": "attnops", "fa3": "FA3"}
        kept = [
            records.Record(f"nano-vllm {options.shape}", names[name], params, value * 1e3, note=note)
            for name, value in median.items()
        ]
        print(records.write(kept, "h200-nano-vllm"))
    atexit.unregister(engine.exit)
    engine.exit()


if __name__ == "__main__":
    main()
