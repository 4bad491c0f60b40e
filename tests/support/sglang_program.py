"""A whole engine of SGLang on the CPU, run as a program: greedy tokens of some prompts, and calls of attnops.

Argument: a JSON object: `options` (of `Engine`), `prompts` (token ids), `rounds`, `max_tokens`. Prints a JSON object:
`tokens` by round and prompt, `calls` by mode and pool.
"""

from __future__ import annotations

import collections
import json
import os
import sys


def count_calls() -> None:
    """A plug-in of SGLang for tests: each call of a layer, in any process of it, is a line of the file CALLS."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def count(backend, q, k, v, layer, forward_batch, *args, **options) -> None:
        with open(os.environ["CALLS"], "a") as calls:
            pool = type(backend.token_to_kv_pool).__name__
            calls.write(f"{forward_batch.forward_mode.name}:{pool}:{layer.sliding_window_size}\n")

    target = "attnops.plugins.sglang.backend.AttnopsAttnBackend.forward"
    HookRegistry.register(target, count, HookType.BEFORE)


def main(request: dict) -> None:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(device="cpu", skip_tokenizer_init=True, log_level="error", **request["options"])
    greedy = {"temperature": 0, "max_new_tokens": request["max_tokens"], "ignore_eos": True}
    tokens = []
    for _ in range(request["rounds"]):
        results = engine.generate(input_ids=request["prompts"], sampling_params=greedy)
        tokens.append([result["output_ids"] for result in results])
    with open(os.environ["CALLS"]) as lines:
        calls = collections.Counter(lines.read().split())
    print("RESULT " + json.dumps({"tokens": tokens, "calls": calls}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
