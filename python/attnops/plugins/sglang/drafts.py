"""SGLang's draft model on attnops: a backend per step of a chain, planned together before the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from attnops.plugins.sglang.backend import AttnopsAttnBackend


class DraftStepBackend(AttnopsAttnBackend):
    """One step: each request has `new_tokens` more keys than the batch says."""

    def __init__(self, runner: Any, new_tokens: int) -> None:
        super().__init__(runner)
        self._new_tokens = new_tokens

    def _lengths(self, forward_batch: Any, size: int) -> Tensor:
        lens: Tensor = forward_batch.seq_lens[:size] + self._new_tokens
        return lens

    def forward(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **options: Any) -> Tensor:
        """As of the base; where to store is known only now, one step after the other."""
        batch = self._current(forward_batch)
        batch.out_cache_loc = forward_batch.out_cache_loc[: batch.num_tokens]
        return super().forward(q, k, v, layer, forward_batch, *args, **options)

    def forward_decode(self, *args: Any, **options: Any) -> Tensor:
        return self.forward(*args, **options)

    forward_extend = forward_decode


class AttnopsMultiStepDraftBackend:
    """What SGLang plans before a draft model's steps.

    Raises:
        NotImplementedError: for drafts with branches, `topk` above 1.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        if topk != 1:
            raise NotImplementedError(f"attnops: SGLang's draft model is served with topk 1, got {topk}")
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [DraftStepBackend(runner, step + 1) for step in range(speculative_num_steps - 1)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_bs)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Each step decodes a token of each request, whatever the batch's own mode."""
        step = SimpleNamespace(
            batch_size=forward_batch.batch_size,
            forward_mode=ForwardMode.DECODE,
            input_ids=forward_batch.seq_lens,
            req_pool_indices=forward_batch.req_pool_indices,
            out_cache_loc=None,
        )
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(step, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.plan_step(forward_batch)


def around_create_backend(
    original: Any, factory: Any, name: str, known: dict[str, Any], error: str, stamps_children: bool = False
) -> Any:
    """`DraftBackendFactory._create_backend`, with attnops known: for the steps, or for what extends the draft."""

    def create() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if stamps_children:
            return "attnops", AttnopsMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return "attnops", AttnopsAttnBackend(runner)

    return original(factory, name, known | {"attnops": create}, error, stamps_children=stamps_children)
