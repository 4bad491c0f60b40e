"""SGLang's whole engine on the CPU, with attnops behind it: the tokens of transformers, whose attention is eager.

The engine's processes find attnops through the entry point that pyproject.toml declares. Prompts come in pieces, beside
decodes; in a second round they are found in the prefix cache.
"""

from __future__ import annotations

import pytest
import sglang_engine
import tiny_models
from vllm_engine import declare_packages

MISSING = sglang_engine.missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return declare_packages(tmp_path_factory.mktemp("sglang"))


CASES = {  # a model, options, rounds, and what must have served which layers
    "GQA": ("llama", {}, 2, {"EXTEND:MHATokenToKVPool:-1", "DECODE:MHATokenToKVPool:-1"}),
    "pages of 16, beside SGLang's own prompts": (
        "llama",
        {"page_size": 16, "prefill_attention_backend": "torch_native", "decode_attention_backend": "attnops"},
        1,
        {"DECODE:MHATokenToKVPool:-1"},
    ),
    "soft cap, windows": ("gemma", {}, 1, {"EXTEND:MHATokenToKVPool:6", "DECODE:MHATokenToKVPool:-1"}),
    "sinks, windows in a pool of their own": (
        "gpt_oss",
        {},
        2,
        {f"{mode}:SWAKVPool:{window}" for mode in ("EXTEND", "DECODE") for window in (5, -1)},
    ),
    "MLA, prompts not absorbed": ("deepseek_yarn", {}, 2, {"EXTEND:MLATokenToKVPool:-1", "DECODE:MLATokenToKVPool:-1"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_that_of_eager_attention(case, folder):
    kind, options, rounds, served = CASES[case]
    model = tiny_models.model(kind)
    got = sglang_engine.run(folder, sglang_engine.save(model, kind, folder / kind), rounds, options)
    assert got["tokens"] == [sglang_engine.eager_tokens(model)] * rounds
    assert served <= set(got["calls"]), got["calls"]
    if "prefill_attention_backend" in options:
        assert not any(call.startswith("EXTEND") for call in got["calls"])
