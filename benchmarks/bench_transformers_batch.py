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

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
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
    settings = transformers.GenerationConfig(**count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    names = [plugin.CONTINUOUS_NAME, "sdpa"]
    if importlib.util.find_spec("flash_attn_interface"):
        names.append("flash_attention_3")
    times: dict[str, list[float]] = {name: [] for name in names}
    tokens = {}
    for turn in range(options.turns + 1):
        for name in names:
            model.set_attn_implementation(name)
            begin = time.perf_counter()
            results = model.generate_batch(inputs, generation_config=settings, progress_bar=False)
            if options.device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - begin)
            tokens[name] = [result.generated_tokens for result in results.values()]
            print(f"turn {turn} {name}: {time.perf_counter() - begin:.2f} s", flush=True)
    ours = sorted(tokens[names[0]])
    for name in names:
        seconds = statistics.median(times[name])
        equal = sum(a == b for a, b in zip(ours, sorted(tokens[name]), strict=True))
        rate = options.requests * options.new_tokens / seconds
        print(f"{name:<28} {rate:9.0f} tokens/s  {equal} of {len(ours)} requests as attnops")


if __name__ == "__main__":
    main()
