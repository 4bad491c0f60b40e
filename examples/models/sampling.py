"""Choosing the next byte, and reference generation one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .weights import Model, contiguous_cache

END_OF_TEXT = 0


def encode(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None, top_p: float = 1.0) -> int:
    """One byte from logits [vocab_size]. Temperature 0 is greedy; on a tie the smallest byte wins."""
    if temperature == 0:
        return int(logits.argmax())
    probs, order = (logits.float() / temperature).softmax(-1).cpu().sort(descending=True, stable=True)
    probs[probs.cumsum(-1) - probs >= top_p] = 0  # keeps the fewest bytes that reach top_p, at least one
    # Drawn by byte, not by rank: rounding that swaps two ranks must not swap their random numbers, too.
    by_byte = torch.zeros_like(probs).scatter_(0, order, probs)
    return int(torch.multinomial(by_byte, 1, generator=generator))


@torch.inference_mode()
def generate(
    model: Model, prompt: list[int], max_new: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yields up to `max_new` bytes after `prompt`, computed with a contiguous cache and plain PyTorch."""
    if len(prompt) + max_new > model.config.max_context:
        raise ValueError(f"{len(prompt)} + {max_new} bytes exceed the context of {model.config.max_context}")
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    cache = contiguous_cache(model)
    tokens, begin = list(prompt), 0
    for _ in range(max_new):
        step = torch.tensor(tokens[begin:], device=device)
        positions = torch.arange(begin, len(tokens), device=device)
        begin = len(tokens)
        token = sample(model(step, positions, cache)[-1], temperature, generator, top_p)
        if token == END_OF_TEXT:
            return
        tokens.append(token)
        yield token
