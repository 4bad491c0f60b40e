"""A whole engine of vLLM on the CPU, run as a program: greedy tokens of some prompts, and how often attnops was called.

Argument: a JSON object: `model` (a folder), `options` (of `LLM`), `prompts` (token ids), `rounds`, `max_tokens`.
Prints a JSON object: `tokens` and `logprobs` by round and prompt, `calls` by op, `backends` and `prefill_backends` by
name, `attnops` (the package's file; None where nothing imported it).
"""

from __future__ import annotations

import collections
import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

COUNTED = ("store_kv", "store_mla_kv", "xqa_decode", "fmha_paged", "fmha_varlen", "mla_decode")


def counted(inner, name: str):
    """A function whose calls, in any process of the engine, are lines of the file CALLS."""

    def call(*args, **options):
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(name + "\n")
        return inner(*args, **options)

    call.counts = True
    return call


def count_calls() -> None:
    """A plug-in of vLLM for tests: it counts the calls of ops."""
    from attnops import ops

    for name in COUNTED:
        if not hasattr(getattr(ops, name), "counts"):
            setattr(ops, name, counted(getattr(ops, name), name))


def main(request: dict) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.sched.scheduler import Scheduler

    # Requests that lose their blocks, where the scheduler is in this process.
    Scheduler._preempt_request = counted(Scheduler._preempt_request, "preempted")
    engine = LLM(request["model"], skip_tokenizer_init=True, **request["options"])
    greedy = SamplingParams(
        temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False, logprobs=2
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    tokens, logprobs = [], []
    for _ in range(request["rounds"]):
        outputs = [result.outputs[0] for result in engine.generate(prompts, greedy, use_tqdm=False)]
        tokens.append([list(output.token_ids) for output in outputs])
        logprobs.append(
            [
                [sorted((lp.logprob for lp in step.values()), reverse=True)[:2] for step in output.logprobs]
                for output in outputs
            ]
        )
    known = {name: AttentionBackendEnum[name].get_path() for name in ("CPU_ATTN", "CPU_MLA")}
    known |= {name: member.get_path() for name, member in AttentionBackendEnum.__members__.items() if "ATTNOPS" in name}
    of_prompts = {name: MLAPrefillBackendEnum[name].get_path() for name in ("CPU", "FLASH_ATTN")}
    with open(os.environ["CALLS"]) as lines:
        calls = collections.Counter(lines.read().split())
    ours = getattr(sys.modules.get("attnops"), "__file__", None)
    result = {"tokens": tokens, "logprobs": logprobs, "calls": calls, "attnops": ours}
    print("RESULT " + json.dumps(result | {"backends": known, "prefill_backends": of_prompts}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
