"""The example models: every way to compute one gives the same logits, and the shipped weights predict English."""

import math
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import models  # noqa: E402

# Written for this test: in none of the works that the models learned from.
ENGLISH = (
    "The rain had stopped before the carriage came to the bridge, and the two sisters, who had been silent since the "
    "morning, began to speak of their mother, and of the letter which she had sent them from the coast."
)


@pytest.fixture(scope="module", params=["gqa", "mla"])
def model(request):
    return models.load_model(EXAMPLES / "weights" / f"{request.param}.safetensors", torch.float32)


def whole(model, tokens):
    """Logits of all tokens at once, as in training: MLA's heads expanded, PyTorch's fused attention."""
    return model(tokens, torch.arange(len(tokens)), models.batch_attend(model, 1))


def cached(model, tokens, sizes, absorbed=True):
    """Logits of all tokens through a cache, `sizes` tokens at a time."""
    cache = models.contiguous_cache(model, absorbed)
    parts = tokens.split(sizes), torch.arange(len(tokens)).split(sizes)
    return torch.cat([model(chunk, positions, cache) for chunk, positions in zip(*parts)])


@pytest.mark.parametrize("absorbed", [True, False])
def test_cache_equals_whole(model, absorbed):
    tokens = torch.tensor(models.encode(ENGLISH))
    sizes = [70, 1, 1, 40, *[1] * (len(tokens) - 112)]
    # Logits are up to about 30; fp32 sums in another order differ by some 1e-5.
    torch.testing.assert_close(cached(model, tokens, sizes, absorbed), whole(model, tokens), rtol=0, atol=2e-4)


def test_later_tokens_change_nothing_before_them(model):
    tokens = torch.tensor(models.encode(ENGLISH))
    other = tokens.clone()
    other[100:] = ord("x")
    before, after = whole(model, tokens), whole(model, other)
    torch.testing.assert_close(before[:100], after[:100], rtol=0, atol=2e-4)
    assert (before[100:] - after[100:]).abs().max() > 1


def test_weights_predict_english(model):
    def bits_per_byte(text):
        tokens = torch.tensor(models.encode(text))
        log_probs = whole(model, tokens)[:-1].log_softmax(-1)
        return -log_probs.gather(-1, tokens[1:, None]).mean() / math.log(2)

    backwards = " ".join(reversed(ENGLISH.split()))
    assert bits_per_byte(ENGLISH) < 1.3  # measured: 1.08 and 1.07
    assert bits_per_byte(backwards) > 1.8  # the same words in no order: grammar was learned, not only spelling


def test_generation_is_repeatable_and_stops_at_the_context(model):
    prompt = models.encode("And Moses went up into ")
    for temperature in (0.0, 0.8):
        runs = [list(models.generate(model, prompt, 24, temperature, top_p=0.9, seed=5)) for _ in range(2)]
        assert runs[0] == runs[1]
        assert len(runs[0]) == 24
    with pytest.raises(ValueError, match="exceed the context of 2048"):
        next(models.generate(model, prompt, 2048))


def test_sample_respects_top_p():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {models.sample(logits, 1.0, generator, top_p=0.6) for _ in range(200)}
    assert drawn == {0, 1}
    assert models.sample(logits, 0.0) == 0


def test_save_and_load_keep_a_model(tmp_path):
    torch.manual_seed(0)
    model = models.build_model(models.MlaConfig(d_model=32, num_layers=1, num_heads=2, ffn_dim=16)).eval()
    models.save_model(model, tmp_path / "m.safetensors", torch.float32)
    again = models.load_model(tmp_path / "m.safetensors", torch.float32)
    assert again.config == model.config
    tokens = torch.tensor(models.encode("abc"))
    torch.testing.assert_close(whole(again, tokens), whole(model, tokens), rtol=0, atol=0)
