"""The draft loop of a sparse model, by SGLang's names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnops.backends.multi_step import MultiStepDraftBackend
from attnops.backends.nsa import DeepseekSparseAttnBackend
from attnops.types import AttentionSpec, Limits


class DeepseekSparseAttnMultiStepBackend(MultiStepDraftBackend):
    """`MultiStepDraftBackend` over `nsa`: all steps' lists have one expansion and one plan, in the graph.

    Branches are requests of their own, so `step(s).req_to_token` has the slots of a branch in the order of its tokens.
    A layer's lists hold slots of that table: `topk_select` over its pages makes them.

    Args:
        spec, limits, device, topk, draft_steps: As of `MultiStepDraftBackend`.
        options: Of `nsa`.

    Raises:
        ValueError: as of both.
    """

    name = "nsa_multi_step"

    def __init__(
        self,
        spec: AttentionSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        topk: int,
        draft_steps: int,
        **options: Any,
    ) -> None:
        make = functools.partial(DeepseekSparseAttnBackend, **options)
        super().__init__(make, spec, limits, device, topk=topk, draft_steps=draft_steps)


NativeSparseAttnMultiStepBackend = DeepseekSparseAttnMultiStepBackend
