"""transformers' `generate` and `generate_batch` on a GPU: the tokens of eager attention, in float32."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from attnops.plugins import unsupported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(unsupported("transformers")), reason=unsupported("transformers") or "-"),
]
NEW = 14


def model_of(kind: str):
    from attnops.plugins import transformers as plugin

    plugin.register()
    return tiny_models.model(kind).cuda()


def generated(model, ids, mask, cache, **options):
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    options["cache_implementation"] = None if cache == "dynamic" else cache
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_generate_gives_the_tokens_of_eager(kind, cache):
    model, ids = model_of(kind), tiny_models.prompts(4, 13).cuda()
    mask = torch.ones_like(ids)
    for request, padding in enumerate([0, 5, 12, 1]):
        mask[request, :padding] = 0
        ids[request, :padding] = 0
    model.set_attn_implementation("eager")
    expected = generated(model, ids, mask, cache, disable_compile=True)
    model.set_attn_implementation("attnops")
    assert torch.equal(generated(model, ids, mask, cache, disable_compile=True), expected)


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt_oss"])
def test_continuous_batching_gives_the_tokens_of_generate(kind):
    import transformers
    from attnops.plugins import transformers as plugin

    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("continuous batching takes names of flash attention from transformers 5.23 on")
    model, inputs, expected = model_of(kind), [], []
    model.set_attn_implementation("eager")
    for length in (3, 17, 9, 30):
        row = tiny_models.prompts(1, length, seed=length).cuda()
        inputs.append(row[0].tolist())
        expected.append(generated(model, row, torch.ones_like(row), "dynamic")[0].tolist())
    model.set_attn_implementation(plugin.CONTINUOUS_NAME)
    config = transformers.GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    batching = transformers.ContinuousBatchingConfig(max_memory_percent=0.02)  # other tests share the GPU
    results = model.generate_batch(
        inputs, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    assert sorted(result.generated_tokens for result in results.values()) == sorted(expected)
