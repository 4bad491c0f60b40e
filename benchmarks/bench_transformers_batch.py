"""transformers' `generate_batch` on a GPU: attnops' paged functions beside `sdpa` and a FlashAttention-3, in turns.

A Llama of 8 layers with random weights, 64 requests of 100 to 1000 tokens, 64 new tokens each. FlashAttention-3 is
measured where its package `flash_attn_interface` is installed.

    PYTHONPATH=python python benchmarks/bench_transformers_batch.py
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time

import records
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.3, help="share of free memory that the cache may take")
    parser.add_argument("--seconds", type=float, default=600, help="no further turn begins after that")
    parser.add_argument("--write", action="store_true", help="results/h200-transformers.jsonl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts: to see that it runs")
    options = parser.parse_args()
    import transformers
    from attnops.plugins import transformers as plugin

    plugin.register()
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if options.tiny:
        size = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers, vocab_size=32000, max_position_embeddings=4096, eos_token_id=None, **size
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    draw, longest = random.Random(0), 30 if options.tiny else 1000
    inputs = [draw.choices(range(3, 32000), k=draw.randint(longest // 10, longest)) for _ in range(options.requests)]
    count = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}
    # sdpa stays sdpa where a FlashAttention is installed; others may hold memory of the same GPU.
    batching = transformers.ContinuousBatchingConfig(auto_switch_to_flash=False, max_memory_percent=options.memory)
    settings = transformers.GenerationConfig(**count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    names = [plugin.CONTINUOUS_NAME, "sdpa"]
    if importlib.util.find_spec("flash_attn_interface"):
        names.append("flash_attention_3")
    times: dict[str, list[float]] = {name: [] for name in names}
    tokens = {}
    start = time.perf_counter()
    for turn in range(options.turns + 1):
        if turn > 1 and time.perf_counter() - start > options.seconds:
            break
        for name in names:
            model.set_attn_implementation(name)
            begin = time.perf_counter()
            results = model.generate_batch(
                inputs, generation_config=settings, continuous_batching_config=batching, progress_bar=False
            )
            if options.device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - begin)
            tokens[name] = [result.generated_tokens for result in results.values()]
            print(f"turn {turn} {name}: {time.perf_counter() - begin:.2f} s", flush=True)
    ours, kept = sorted(tokens[names[0]]), []
    params = {"requests": options.requests, "new_tokens": options.new_tokens, "layers": options.layers}
    for name in names:
        seconds = statistics.median(times[name])
        equal = sum(a == b for a, b in zip(ours, sorted(tokens[name]), strict=True))
        rate = options.requests * options.new_tokens / seconds
        ratio = seconds / statistics.median(times[names[0]])
        print(f"{name:<28} {rate:9.0f} tokens/s  {ratio:.2f}x  {equal} of {len(ours)} requests as attnops", flush=True)
        peer, release = ("attnops", "") if name == names[0] else (f"transformers {name}", transformers.__version__)
        note = f"generate_batch, {equal} of {len(ours)} requests with attnops' tokens"
        kept.append(records.Record("transformers generate_batch", peer, params, seconds * 1e3, release, note=note))
    if options.write:
        print(records.write(kept, "h200-transformers"))


if __name__ == "__main__":
    main()
