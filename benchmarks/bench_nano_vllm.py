"""nano-vllm, a whole engine, unmodified, on `attnops.compat.flash_attn` and on FlashAttention-3, in turns, on one GPU.

The engine imports `flash_attn`; here that is a module whose two functions change from turn to turn. The model has the
shape of Qwen3 0.6B or 8B, and random weights. Tokens per second are measured with the engine's own sampler and
decode graphs. With a greedy sampler put in its place, the tokens of both sides are compared.

    PYTHONPATH=python python benchmarks/bench_nano_vllm.py CHECKOUT --requests 256
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import types
from pathlib import Path

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
    """sglang-kernel's, by the arguments that nano-vllm gives."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def varlen(q, k, v, *, block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        if block_table is None:
            return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
        lens = cu_seqlens_k.diff()
        paged = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "page_table": block_table}
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, **paged, **options)

    def kvcache(q, k_cache, v_cache, *, block_table, **options):
        return flash_attn_with_kvcache(q, k_cache, v_cache, page_table=block_table, **options)

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
    """The same random weights for every engine: norms of one, matrices that keep a row's size.

    The head's rows are the embeddings in another order. So most tokens have a favourite successor, as in a trained
    model. With independent rows all leads would be within a rounding.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1)
            elif "lm_head" not in name:
                scale = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator, device="cuda") * scale)
        embedding = model.model.embed_tokens.weight
        order = torch.randperm(embedding.shape[0], generator=generator, device="cuda")
        model.lm_head.weight.copy_(embedding[order])


def greedy_tokens(
    engine, prompts: list[list[int]], count: int, parameters
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of each request, and the lead of each."""
    sampler, greedy = engine.model_runner.sampler, Greedy()
    engine.model_runner.sampler = greedy
    order: list[list[int]] = []
    run = engine.model_runner.run
    engine.model_runner.run = lambda seqs, is_prefill: (order.append([s.seq_id for s in seqs]), run(seqs, is_prefill))[
        1
    ]
    made = engine.generate(prompts, parameters(temperature=1.0, max_tokens=count, ignore_eos=True), use_tqdm=False)
    engine.model_runner.sampler, engine.model_runner.run = sampler, run
    leads: dict[int, list[float]] = {}
    for ids, row in zip(order, greedy.leads, strict=True):
        for request, lead in zip(ids, row, strict=True):
            leads.setdefault(request, []).append(lead)
    return [request["token_ids"] for request in made], [leads[i] for i in sorted(leads)]


def compare(ours: tuple, theirs: tuple, count: int) -> dict:
    """Requests that agree to their end, and at each first difference the smaller lead of the two sides."""
    whole, ties = 0, []
    for a, b, lead_a, lead_b in zip(ours[0], theirs[0], ours[1], theirs[1], strict=True):
        first = next((i for i in range(count) if a[i] != b[i]), count)
        whole += first == count
        if first < count:
            ties.append((first, min(lead_a[-count:][first], lead_b[-count:][first])))
    leads = sorted(lead for _, lead in ties)
    return {"requests": len(ours[0]), "equal to the end": whole, "largest lead at a first difference": leads[-1:]} | {
        "median lead there": leads[len(leads) // 2 : len(leads) // 2 + 1],
        "leads of all tokens, median": sorted(x for row in ours[1] for x in row)[sum(map(len, ours[1])) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="nano-vllm's folder")
    parser.add_argument("--shape", choices=("0.6B", "8B"), default="0.6B", help="of Qwen3")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most-input", type=int, default=1024)
    parser.add_argument("--most-output", type=int, default=256)
    parser.add_argument("--greedy-tokens", type=int, default=64, help="of a request, to compare; 0: none")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that the engine may take")
    parser.add_argument("--turns", nargs="+", default=["attnops", "fa3", "attnops"])
    options = parser.parse_args()
    sides = {"attnops": attnops, "fa3": flash_attention_3}
    shim = types.ModuleType("flash_attn")
    chosen = dict.fromkeys(("varlen", "kvcache"), lambda *args, **given: None)
    shim.flash_attn_varlen_func = lambda *args, **given: chosen["varlen"](*args, **given)
    shim.flash_attn_with_kvcache = lambda *args, **given: chosen["kvcache"](*args, **given)
    sys.modules["flash_attn"] = shim
    sys.path.insert(0, options.checkout)
    import transformers

    tokenizer = types.SimpleNamespace(eos_token_id=-1, decode=lambda ids: "", encode=lambda text: [1, 2, 3])
    transformers.AutoTokenizer.from_pretrained = lambda *args, **given: tokenizer
    from nanovllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG | (LARGER if options.shape == "8B" else {})))
    random.seed(0)
    draw = [
        (random.randint(100, options.most_input), random.randint(32, options.most_output))
        for _ in range(options.requests)
    ]
    prompts = [[random.randint(0, 10000) for _ in range(n)] for n, _ in draw]
    lengths = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for _, n in draw]
    greedy: dict[str, tuple] = {}
    for turn, name in enumerate(options.turns):
        chosen["varlen"], chosen["kvcache"] = sides[name]()
        begin = time.perf_counter()
        engine = LLM(
            str(folder),
            enforce_eager=False,
            max_model_len=4096,
            max_num_seqs=options.requests,
            gpu_memory_utilization=options.memory,
        )
        fill(engine.model_runner.model)
        made = time.perf_counter() - begin
        engine.generate(prompts[:8], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, lengths, use_tqdm=False)
        seconds = time.perf_counter() - begin
        total = sum(n for _, n in draw)
        print(
            f"turn {turn} {name}: {total / seconds:.0f} tokens/s ({total} in {seconds:.2f} s; made in {made:.1f} s)",
            flush=True,
        )
        if options.greedy_tokens and name not in greedy:
            # Other prompts: the prefix cache holds these ones' blocks.
            others = [prompt[::-1] for prompt in prompts]
            greedy[name] = greedy_tokens(engine, others, options.greedy_tokens, SamplingParams)
        engine.exit()
        import atexit

        atexit.unregister(engine.exit)
        del engine
        torch.cuda.empty_cache()
    if len(greedy) == 2:
        print(json.dumps(compare(greedy["attnops"], greedy["fa3"], options.greedy_tokens)))


if __name__ == "__main__":
    main()
