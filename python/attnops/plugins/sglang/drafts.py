"""SGLang's draft model on attnops: a backend per step, planned together before the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode as SGLangMode
from torch import Tensor

from attnops.backends import MultiStepDraftBackend
from attnops.plugins.sglang.backend import AttnopsAttnBackend, build
from attnops.types import AttentionBatch, ForwardMode


class DraftStepBackend(AttnopsAttnBackend):
    """One step of a chain: each request has `new_tokens` more keys than the batch says."""

    def __init__(self, runner: Any, new_tokens: int) -> None:
        super().__init__(runner)
        self._new_tokens = new_tokens

    def _lengths(self, forward_batch: Any, size: int) -> Tensor:
        lens: Tensor = forward_batch.seq_lens[:size] + self._new_tokens
        return lens

    def plan_draft(self, forward_batch: Any, in_capture: bool) -> None:
        """Host work of this step."""
        step = SimpleNamespace(
            batch_size=forward_batch.batch_size,
            forward_mode=SGLangMode.DECODE,
            input_ids=forward_batch.seq_lens,
            req_pool_indices=forward_batch.req_pool_indices,
            out_cache_loc=None,
        )
        self.init_forward_metadata_out_graph(step, in_capture)

    def forward(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **options: Any) -> Tensor:
        """As of the base; where to store is known only now, one step after the other."""
        batch = self._current(forward_batch)
        batch.out_cache_loc = forward_batch.out_cache_loc[: batch.num_tokens]
        return super().forward(q, k, v, layer, forward_batch, *args, **options)

    def forward_decode(self, *args: Any, **options: Any) -> Tensor:
        return self.forward(*args, **options)

    forward_extend = forward_decode


class Branches(MultiStepDraftBackend):
    """attnops' loop of branches, where SGLang has already put a copy of the prefix's partial page before each."""

    def _copy_tails(self, pool: Any, batch: AttentionBatch, prefix: Tensor) -> None:
        return


class BranchStepBackend(AttnopsAttnBackend):
    """One step of a loop of branches, which plans all of them: a token of each branch of each request."""

    def __init__(self, runner: Any, index: int, topk: int, draft_steps: int, loop: Branches | None) -> None:
        self._index, self._loop, self._size = index, loop, (topk, draft_steps)
        super().__init__(runner)
        self._no_padding = torch.zeros(self._limits.max_batch_size, dtype=torch.int64, device=runner.device)

    def _make_backend(self, device: torch.device) -> Branches:
        """With pages of one token SGLang's cells are those of attnops' trees. With others, branches are requests."""
        if self._loop is None:
            topk, draft_steps = self._size
            options: dict[str, Any] = {"topk": topk, "draft_steps": draft_steps, "trees": self._spec.page_size == 1}
            self._loop = Branches(build, self._spec, self._limits, device, **options)
        return self._loop

    @property
    def loop(self) -> Branches:
        assert self._loop is not None
        return self._loop

    def plan_draft(self, forward_batch: Any, in_capture: bool) -> None:
        """Host work of all steps."""
        size = forward_batch.batch_size
        self._batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE if size else ForwardMode.IDLE,
            req_pool_indices=forward_batch.req_pool_indices[:size],
            cache_seqlens=self._cache_seqlens[:size],
            num_tokens=size,
            req_to_token=self._tokens,
            out_cache_loc=self._no_padding[:size],
            token_to_kv_pool=self._pool,
        )
        self.loop.init_forward_metadata_out_graph(self._batch, in_capture)

    def plan_step(self, forward_batch: Any) -> None:
        """Device work of all steps. SGLang counts the prefix alone, attnops the first step's token, too."""
        assert self._batch is not None
        if self._batch.batch_size:
            torch.add(forward_batch.seq_lens[: self._batch.batch_size], 1, out=self._batch.cache_seqlens)
            self.loop.init_forward_metadata_in_graph(self._batch)

    def _current(self, forward_batch: Any) -> AttentionBatch:
        """The step, with SGLang's slots: those of padding are in its own dummy page."""
        batch = self.loop.step(self._index)
        batch.out_cache_loc = forward_batch.out_cache_loc[: batch.num_tokens]
        return batch


class AttnopsMultiStepDraftBackend:
    """What SGLang plans before a draft model's steps: chains, and trees of `topk` branches.

    Raises:
        NotImplementedError: the draft model has a pool for its windows.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        if type(runner.token_to_kv_pool).__name__ == "SWAKVPool":
            raise NotImplementedError("attnops: SGLang's draft model is served over one pool, got an SWAKVPool")
        if runner.use_mla_backend:
            _give_stores_dense_slots()
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends: list[DraftStepBackend | BranchStepBackend] = []
        loop: Branches | None = None
        for index in range(speculative_num_steps - 1):
            if topk == 1:
                self.attn_backends.append(DraftStepBackend(runner, index + 1))
                continue
            step = BranchStepBackend(runner, index, topk, speculative_num_steps, loop)
            loop = step.loop
            self.attn_backends.append(step)

    @property
    def _planned(self) -> list[DraftStepBackend | BranchStepBackend]:
        """Of branches the first step plans all."""
        return self.attn_backends[: 1 if self.topk > 1 else None]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self._planned:
            backend.init_cuda_graph_state(max_bs, max_bs)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Each step decodes a token of each branch, whatever the batch's own mode."""
        for backend in self._planned:
            backend.plan_draft(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self._planned:
            backend.plan_step(forward_batch)


def _give_stores_dense_slots() -> None:
    """SGLang's loop gives each step's store a strided view of slots, and its CUDA store of latents ignores the stride.

    Rows of all requests but the first would go to slots of the first one's later steps.
    """
    from sglang.srt.speculative import eagle_worker_v2

    slots_of_steps = eagle_worker_v2.per_step_draft_out_cache_loc
    if getattr(slots_of_steps, "is_dense", False):
        return

    def dense(*args: Any, **options: Any) -> Tensor:
        slots: Tensor = slots_of_steps(*args, **options)
        return slots.contiguous()

    dense.is_dense = True  # type: ignore[attr-defined]
    eagle_worker_v2.per_step_draft_out_cache_loc = dense


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
