"""A serving loop that speculates: decoding requests verify a tree of drafts a step, beside prompts in chunks."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import torch
from attnops import ops
from attnops.backends import AttentionBackend, MultiStepDraftBackend, select_backend
from attnops.graphs import GraphRunner, MemoryReport, RecorderFactory, StaticInput
from attnops.ops.speculation import Verified
from attnops.speculative import DraftInput, VerifyInput, keep_accepted
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from models import END_OF_TEXT
from models.draft import DraftHead
from speculate import Paged, propose
from torch import Tensor

from .engine import Engine
from .request import Request
from .runner import ModelRunner
from .scheduler import Share, Step


class LookupDrafts:
    """Chains from the text itself: what followed the last few bytes where they stood before. For any model.

    Args:
        num_tokens: Of a chain, the bonus token included.
    """

    context = 3  # bytes that must be the same
    backend = loop = None  # there is no draft model

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.lookahead = num_tokens, num_tokens
        self.static_inputs = {"drafts": StaticInput((num_tokens - 1,), torch.int64, per="request")}

    def after_prompts(self, step: Step, batch: AttentionBatch, next_ids: Tensor, hidden: Tensor) -> None:
        """Nothing to keep."""

    def inputs(self, requests: list[Request], device: torch.device) -> dict[str, Tensor]:
        return {"drafts": torch.tensor([self._guess(request.tokens) for request in requests]).to(device)}

    def after_verify(self, verified: Verified, hidden: Tensor, batch: AttentionBatch) -> dict[str, Tensor]:
        """Nothing to keep."""
        return {}

    def keep(self, requests: list[Request], done: dict[str, Tensor]) -> None:
        """Nothing to keep."""

    def propose(self, batch: AttentionBatch, bonus: Tensor, *, drafts: Tensor) -> VerifyInput:
        count = self.num_tokens
        chain = torch.arange(-1, count - 2, device=bonus.device).expand(batch.batch_size, -1)
        tree = ops.build_draft_tree(
            chain, chain + 1, batch.cache_seqlens - 1, 1, draft_tokens=drafts, bonus_tokens=bonus
        )  # fmt: skip
        return VerifyInput.of_tree(tree, count)

    def _guess(self, tokens: list[int]) -> list[int]:
        wanted, last = self.num_tokens - 1, tokens[-self.context :]
        for at in range(len(tokens) - self.context - 1, -1, -1):
            if tokens[at : at + self.context] == last:
                found = tokens[at + self.context : at + self.context + wanted]
                return found + [0] * (wanted - len(found))
        return [0] * wanted


class HeadDrafts:
    """Trees of a draft head, which has pages of its own at the target's slots.

    Args:
        topk, draft_steps, num_tokens: Branches of a draft, tokens of a branch, tokens of a tree with the bonus token.
    """

    def __init__(self, head: DraftHead, topk: int, draft_steps: int, num_tokens: int, page_size: int) -> None:
        self.head, self.num_tokens = head, num_tokens
        self.sizes = {"topk": topk, "draft_steps": draft_steps, "num_tokens": num_tokens}
        self.lookahead = max(num_tokens, draft_steps + 1, topk * (draft_steps + 2 * page_size))
        self.states: dict[Request, Tensor] = {}
        dtype = head.fuse.weight.dtype
        self.static_inputs = {"state": StaticInput((head.config.d_model,), dtype, per="request")}

    def attach(self, runner: ModelRunner, backend: str | None) -> None:
        """Pages and backends, once there is a target."""
        slots, page_size, device = runner.pool.size, runner.pool.page_size, runner.device
        self.pages = Paged(self.head.config, page_size, slots, runner.spec.dtype, str(device))

        def make(spec: AttentionSpec, limits: Limits, on: torch.device):
            return select_backend(spec, limits, on, attention_backend=backend)

        sizes = {"max_batch_size": runner.rows.size, "max_seqlen": runner.rows.max_context_len}
        rows = max(runner.chunk, runner.rows.size * self.num_tokens)
        limits = Limits(**sizes, max_num_tokens=rows, max_tokens_per_request=self.num_tokens)
        self.backend, self.loop = make(self.pages.spec, limits, device), None
        topk, steps = self.sizes["topk"], self.sizes["draft_steps"]
        if steps > 1:
            self.loop = MultiStepDraftBackend(
                make, self.pages.spec, Limits(**sizes), device, topk=topk, draft_steps=steps
            )

    def _run(self, ids: Tensor, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        self.backend.init_forward_metadata(batch)
        positions = batch.positions.clamp(max=self.head.config.max_context - 1)
        return self.head(ids, hidden, positions, self.pages.attend(batch))

    def after_prompts(self, step: Step, batch: AttentionBatch, next_ids: Tensor, hidden: Tensor) -> None:
        """The head's rows of prompts: the token after each, and the target's state there."""
        mine = dataclasses.replace(batch, token_to_kv_pool=self.pages.pool, attn_backend=self.backend)
        states = self._run(next_ids, hidden, mine)
        end = 0
        for share in step.shares:
            end += share.num_tokens
            self.states[share.request] = states[end - 1]

    def inputs(self, requests: list[Request], device: torch.device) -> dict[str, Tensor]:
        return {"state": torch.stack([self.states[request] for request in requests])}

    def propose(self, batch: AttentionBatch, bonus: Tensor, *, state: Tensor) -> VerifyInput:
        return propose(self.head, self.loop, self.pages, batch, bonus, state, **self.sizes)

    def after_verify(self, verified: Verified, hidden: Tensor, batch: AttentionBatch) -> dict[str, Tensor]:
        """The draft model's step over what came out: its state at the last token."""
        draft = DraftInput.after_verify(verified, hidden, batch)
        step = draft.prepare_for_extend(batch, self.pages.pool, self.backend)
        return {"state": self._run(draft.input_ids, draft.hidden_states, step)[draft.last_row]}

    def keep(self, requests: list[Request], done: dict[str, Tensor]) -> None:
        for request, state in zip(requests, done["state"].clone()):
            self.states[request] = state


class SpeculativeEngine(Engine):
    """As `Engine`, greedily. A step's prompts run first, and then a tree of drafts for every decoding request.

    Args:
        runner: With the drafts' `num_tokens` and `lookahead`.
        drafts: Where trees come from; attached to the runner.
        graphs: A step of the decoding requests (draft, tree, verify, move, draft extend) is one graph. Prompts run
            eagerly.
        recorder: Of the graphs; by default CUDA graphs.

    Attributes:
        depths: Verify steps by how many drafts they accepted.
        graphs: What replays steps; None: they run eagerly.
    """

    def __init__(
        self,
        runner: ModelRunner,
        chunk: int,
        drafts: HeadDrafts | LookupDrafts,
        use_cache: bool = True,
        *,
        graphs: bool = False,
        recorder: RecorderFactory | None = None,
    ) -> None:
        self.drafts, self.lookahead = drafts, drafts.lookahead
        self.depths: Counter[int] = Counter()
        super().__init__(runner, chunk, use_cache)
        self._draft_pool = runner.pool if drafts.backend is None else drafts.pages.pool
        self.graphs = None
        self._first: AttentionBackend = drafts.loop or runner.backend
        if graphs:
            if drafts.loop is None:  # a graph begins with a backend's metadata, and no other step's
                sizes = {"max_batch_size": runner.rows.size, "max_seqlen": runner.rows.max_context_len}
                self._first = select_backend(runner.spec, Limits(**sizes), runner.device)
            shared = {"inputs": drafts.static_inputs, "layers": {}, "recorder": recorder}
            self.graphs = GraphRunner(self._step, self._first, runner.rows.req_to_token, self._draft_pool, **shared)

    def capture(self, progress: bool = True) -> MemoryReport | None:
        """Once, before the first step: what the graphs take; None: there are none."""
        return None if self.graphs is None else self.graphs.capture(progress)

    def mean_accepted(self) -> float:
        """Bytes per verify step."""
        return sum((depth + 1) * count for depth, count in self.depths.items()) / max(self.depths.total(), 1)

    @torch.no_grad()
    def _run(self, step: Step) -> None:
        begin = time.perf_counter()
        stats, scheduler = self.stats, self.scheduler
        stats.peak_pages = max(stats.peak_pages, scheduler.pages_in_use)
        stats.peak_request_pages = max(stats.peak_request_pages, scheduler.pages_of_requests)
        written = [share for share in step.shares if self._is_decoding(share)]
        prompts = [share for share in step.shares if not self._is_decoding(share)]
        if prompts:
            self._prefill(Step(prompts))
        if written:
            self._speculate(Step(written))
        seconds = time.perf_counter() - begin
        stats.add(step, seconds, seconds)

    def _is_decoding(self, share: Share) -> bool:
        """It has written a token, so that its text has a last one that no model has seen."""
        return share.num_tokens == 1 and share.begin >= len(share.request.prompt)

    def _prefill(self, step: Step) -> None:
        runner = self.runner
        ids, batch = runner.batch_of(step)
        runner.backend.init_forward_metadata(batch)
        hidden = runner.paged_model.hidden(ids, batch.positions, batch)
        ends = torch.tensor([share.num_tokens for share in step.shares]).cumsum(0) - 1
        logits = runner.model.output(hidden[ends.to(hidden.device)]).float().cpu()
        shifted = ids.roll(-1)
        for end, share, row in zip(ends.tolist(), step.shares, logits):
            known = share.request.tokens
            shifted[end] = known[share.end] if share.end < len(known) else int(row.argmax())
        self.drafts.after_prompts(step, batch, shifted, hidden)
        self.scheduler.commit(step)
        for share, row in zip(step.shares, logits):
            if not share.request.pending:
                self._append(share.request, row)

    def _append(self, request: Request, logits: Tensor) -> bool:
        """One more token of the output; True: it was the last."""
        request.choices.append(logits)
        request.append(int(logits.argmax()), END_OF_TEXT)
        if request.finish_reason:
            request.computed = min(request.computed, len(request.tokens))
            self.scheduler.finish(request)
        return bool(request.finish_reason)

    def _speculate(self, step: Step) -> None:
        runner, drafts, requests = self.runner, self.drafts, [share.request for share in step.shares]
        lengths = torch.tensor([share.begin for share in step.shares], dtype=torch.int32).to(runner.device)
        rows = torch.tensor([request.row for request in requests]).to(runner.device)
        bonus = torch.tensor([request.tokens[-1] for request in requests]).to(runner.device)
        batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=rows,
            cache_seqlens=lengths + 1,
            num_tokens=len(requests),
            req_to_token=runner.rows.req_to_token,
            out_cache_loc=torch.zeros_like(rows),
            positions=lengths.long(),
            token_to_kv_pool=self._draft_pool,
            attn_backend=self._first,
        )
        inputs = drafts.inputs(requests, runner.device)
        if self.graphs is not None:
            done = self.graphs.replay(bonus, batch, **inputs)
        else:
            if drafts.loop is not None:
                drafts.loop.init_forward_metadata(batch)
            done = self._step(bonus, batch.positions, batch, **inputs)
        drafts.keep(requests, done)
        self.scheduler.commit(step)
        logits = done["logits"].flatten(0, 1).to("cpu", copy=True)  # the next replay overwrites them
        for request, path in zip(requests, done["accept_index"].tolist()):
            taken = [node for node in path if node >= 0]
            self.depths[len(taken) - 1] += 1
            request.computed += len(taken) - 1
            for node in taken:
                if self._append(request, logits[node]):
                    break

    def _step(self, bonus: Tensor, positions: Tensor, batch: AttentionBatch, **inputs: Tensor) -> dict[str, Tensor]:
        """A step of B decoding requests, with nothing read on the host: what a graph holds.

        Args:
            bonus: int64 ``[B]``, their last tokens. batch: A draft loop's; the loop is prepared for it.
            inputs: As `drafts.inputs` gives them.

        Returns:
            A row a request: `logits` of all nodes, `accept_index`, and what `drafts.keep` wants.
        """
        runner, drafts = self.runner, self.drafts
        tree = drafts.propose(batch, bonus, **inputs)
        verify = tree.prepare_for_verify(batch, runner.pool, runner.backend)
        runner.backend.init_forward_metadata(verify)
        positions = verify.positions.clamp(max=runner.model.config.max_context - 1)
        hidden = runner.paged_model.hidden(tree.draft_token, positions, verify)
        logits = runner.model.output(hidden).float()
        verified = tree.verify(logits.argmax(-1))
        keep_accepted(verified, verify)
        kept = drafts.after_verify(verified, hidden, batch)
        logits = logits.view(batch.batch_size, -1, logits.shape[-1])
        return {"logits": logits, "accept_index": verified.accept_index, **kept}
