"""Where captured steps leave their results: one memory for all sizes, so that a pool of graphs holds none per graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class StaticOutput:
    """What a model gives: a tensor, or tuples and dicts of tensors, each with a row per token.

    Args:
        example: What it gave for the largest step.
        tokens: Of that step.
    """

    def __init__(self, example: Any, tokens: int) -> None:
        leaves, self._spec = tree_flatten(example)
        self._check(leaves, tokens)
        self._leaves = [torch.zeros_like(leaf) for leaf in leaves]
        self._is_single = isinstance(example, Tensor)

    def copy_in(self, out: Any, tokens: int) -> None:
        """Recorded at the end of a step."""
        leaves, spec = tree_flatten(out)
        if spec != self._spec:
            raise ValueError(
                f"attnops: the model gives {spec} for {tokens} tokens and {self._spec} for the largest step"
            )
        self._check(leaves, tokens)
        for static, leaf in zip(self._leaves, leaves):
            static[:tokens].copy_(leaf)

    def rows(self, tokens: int) -> Any:
        """The results of a step's own tokens; the next step overwrites them."""
        if self._is_single:
            return self._leaves[0][:tokens]
        return tree_unflatten([leaf[:tokens] for leaf in self._leaves], self._spec)

    def nbytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in self._leaves)

    @staticmethod
    def _check(leaves: list[Any], tokens: int) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ValueError(f"attnops: a captured model gives tensors, got a {type(leaf).__name__} among them")
            if not leaf.dim() or leaf.shape[0] != tokens:
                raise ValueError(
                    f"attnops: the model gave shape {tuple(leaf.shape)} for {tokens} tokens; a graph serves smaller "
                    "steps, too, so it needs a row per token. Leave what picks tokens (the last of each request) to "
                    "the caller"
                )
