"""The demo's encoder: equal to the original implementation, whatever it is batched with."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

pytest.importorskip("transformers")

import encoder as enc


@pytest.fixture(scope="module")
def encoder():
    return enc.Encoder()


def test_equals_the_original_implementation(encoder):
    texts = [*enc.SENTENCES, "a", "", "attention " * 300]  # one word, none, and 302 tokens
    ours = encoder.embed(texts)
    original = enc.original_embeddings(encoder.tokenize(texts))
    torch.testing.assert_close(ours, original, rtol=0, atol=enc.EMBEDDING_BOUND)
    torch.testing.assert_close(ours.norm(dim=-1), torch.ones(len(texts)))


def test_a_sentence_does_not_depend_on_its_batch(encoder):
    batch = encoder.embed(enc.SENTENCES)
    alone = torch.cat([encoder.embed([sentence]) for sentence in enc.SENTENCES[:3]])
    torch.testing.assert_close(batch[:3], alone, rtol=0, atol=enc.EMBEDDING_BOUND)


def test_ranks_by_meaning(encoder):
    expected = ["universally acknowledged", "damp, drizzly November", "In the beginning God", "golden daffodils",
                "not to the swift", "no disaster"]  # fmt: skip
    scores = encoder.embed(enc.QUERIES) @ encoder.embed(enc.SENTENCES).T
    for best, words in zip(scores.argmax(1).tolist(), expected, strict=True):
        assert words in enc.SENTENCES[best]
