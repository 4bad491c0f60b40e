"""A whole engine of SGLang, run as a program: greedy tokens of some prompts, and calls of attnops.

Argument: a JSON object: `options` (of `Engine`), `prompts` (token ids), `rounds`, `max_tokens`, `device` (the CPU's by
default). Prints a JSON object: `tokens` and, of a GPU, `logprobs` by round and prompt, `calls` by mode and pool.

With PLAIN_OPS set, all but attention is plain PyTorch: no compiled module of SGLang is needed.
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
    if os.environ.get("PLAIN_OPS"):
        from sglang.kernels.fused_op import set_fused_op_backend
        from sglang.kernels.spec import KernelBackend

        set_fused_op_backend(KernelBackend.TORCH)
        # Its module imports CuTe, whatever the GPU.
        HookRegistry.register(
            "sglang.srt.layers.dual_gemm.DualGemm._select_mode", lambda *given: None, HookType.REPLACE
        )


def main(request: dict) -> None:
    from sglang.srt.entrypoints.engine import Engine

    device = request.get("device", "cpu")
    engine = Engine(device=device, skip_tokenizer_init=True, log_level="error", **request["options"])
    greedy = {"temperature": 0, "max_new_tokens": request["max_tokens"], "ignore_eos": True}
    best = {} if device == "cpu" else {"return_logprob": True, "top_logprobs_num": 2}
    tokens, logprobs = [], []
    for _ in range(request["rounds"]):
        results = engine.generate(input_ids=request["prompts"], sampling_params=greedy, **best)
        tokens.append([result["output_ids"] for result in results])
        made = [result["meta_info"]["output_top_logprobs"] for result in results] if best else []
        logprobs.append([[[pair[0] for pair in step] for step in steps] for steps in made])
    with open(os.environ["CALLS"]) as lines:
        calls = collections.Counter(lines.read().split())
    print("RESULT " + json.dumps({"tokens": tokens, "logprobs": logprobs, "calls": calls}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
