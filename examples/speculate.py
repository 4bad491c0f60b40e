"""Speculative decoding: a draft head of one layer guesses a few bytes, the decoder checks a whole tree in one step.

Greedy text is that of plain decoding, byte for byte, which is checked at the end; a difference is an error.

    python examples/speculate.py                            # chains of 5 drafts
    python examples/speculate.py --topk 4 --tokens 16       # trees
    python examples/speculate.py --backend torch_native --page-size 3
    python examples/speculate.py --graphs                   # on a GPU: a step is one CUDA graph
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch's thread pool starts

import torch
from attnops import ops
from attnops.backends import MultiStepDraftBackend, select_backend
from attnops.graphs import GraphRunner, RecorderFactory, StaticInput
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.speculative import DraftInput, VerifyInput, keep_accepted
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from models import GqaModel, decode, encode, generate, load_model
from models.draft import DraftHead, load_draft
from models.sampling import END_OF_TEXT
from prompts import PROMPTS
from torch import Tensor

WEIGHTS = Path(__file__).parent / "weights"
DEPTH_PRICE = 1e-4  # keeps a parent before its child where both are certain


def paged_spec(config, page_size: int, dtype: torch.dtype) -> AttentionSpec:
    dims = {"num_q_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    return AttentionSpec(**dims, dtype=dtype, page_size=page_size)


class Paged:
    """A model's attention over pages of its own, at the slots that all models of a request share."""

    def __init__(self, config, page_size: int, slots: int, dtype: torch.dtype, device: str) -> None:
        self.spec = paged_spec(config, page_size, dtype)
        shape = (config.num_kv_heads, config.head_dim, config.num_layers, device)
        self.pool = MHATokenToKVPool(slots, page_size, dtype, *shape)
        self.layers = [
            RadixAttention(config.num_heads, config.head_dim, config.softmax_scale, config.num_kv_heads, layer_id)
            for layer_id in range(config.num_layers)
        ]
        self.heads = config.num_heads

    def attend(self, batch: AttentionBatch):
        return lambda layer, q, k, v: self.layers[layer](q, k, v, batch).unflatten(-1, (self.heads, -1))


def propose(
    head: DraftHead,
    loop: MultiStepDraftBackend | None,
    pages: Paged,
    batch: AttentionBatch,
    bonus: Tensor,
    state: Tensor,
    *,
    topk: int,
    draft_steps: int,
    num_tokens: int,
) -> VerifyInput:
    """A tree of the likeliest candidates of a draft loop.

    Args:
        loop: Of the head, prepared for the batch; None where a draft is one token deep. pages: The head's.
        batch: The loop's. bonus: int64 ``[B]``, roots of the trees. state: ``[B, D]``, the head's hidden states there.
        topk, draft_steps, num_tokens: As of `Speculator`.
    """
    size, device = batch.batch_size, state.device
    scores, tokens = _log_probabilities(head, state).topk(topk)  # [B, topk], of the branches
    all_scores, all_tokens = [scores], [tokens]
    parents = [torch.arange(-1, topk, device=device).expand(size, -1)]
    hidden = state.unsqueeze(1).expand(-1, topk, -1)
    for index in range(draft_steps - 1):
        assert loop is not None
        step = loop.step(index)
        positions = step.positions.clamp(max=head.config.max_context - 1)  # drafts that no text can reach
        hidden = head(tokens.flatten(), hidden.flatten(0, 1), positions, pages.attend(step))
        logp, next_tokens = _log_probabilities(head, hidden).topk(topk)
        grown = scores.unsqueeze(-1) + logp.view(size, topk, topk) - DEPTH_PRICE
        all_scores.append(grown.flatten(1))
        all_tokens.append(next_tokens.view(size, -1))
        scores, best = grown.flatten(1).topk(topk)
        parents.append(best + topk + topk * topk * index)
        tokens = all_tokens[-1].gather(1, best)
        branch = torch.div(best, topk, rounding_mode="floor").unsqueeze(-1)
        hidden = hidden.view(size, topk, -1).gather(1, branch.expand(-1, -1, hidden.shape[-1]))
    count = min(num_tokens - 1, sum(part.shape[1] for part in all_scores))
    chosen = torch.cat(all_scores, 1).topk(count).indices.sort(-1).values
    tree = ops.build_draft_tree(
        torch.cat(parents, 1),
        chosen,
        batch.cache_seqlens - 1,
        topk,
        draft_tokens=torch.cat(all_tokens, 1).gather(1, chosen),
        bonus_tokens=bonus,
    )
    return VerifyInput.of_tree(tree, min(draft_steps + 1, num_tokens))


def _log_probabilities(head: DraftHead, hidden: Tensor) -> Tensor:
    """Of the next token. Padding of a graph may be NaN, and has a tree of some shape nevertheless."""
    return head.logits(hidden).log_softmax(-1).nan_to_num(nan=-1e4)


class Speculator:
    """Serves a fixed set of requests, greedily.

    Args:
        target, head: On the device and in the dtype that they are to run in.
        topk: Branches of a draft. draft_steps: Tokens of a branch. num_tokens: Of a tree, the bonus token included.
        max_tokens: Of a request, prompt and answer.
        graphs: A step (draft, tree, verify, move, draft extend) is one graph. Prompts run eagerly.
        recorder: Of the graphs; by default CUDA graphs.
    """

    def __init__(
        self,
        target: GqaModel,
        head: DraftHead,
        *,
        topk: int,
        draft_steps: int,
        num_tokens: int,
        page_size: int,
        max_requests: int,
        max_tokens: int,
        backend: str | None = None,
        graphs: bool = False,
        recorder: RecorderFactory | None = None,
    ) -> None:
        weight = target.embedding.weight
        self.target, self.head, self.device = target, head, weight.device
        self.topk, self.draft_steps, self.num_tokens = topk, draft_steps, num_tokens
        self.path_length = min(draft_steps + 1, num_tokens)
        # Behind the longest text stand the drafts of all branches, each on pages of its own.
        room = max_tokens + num_tokens + topk * (draft_steps + 2 * page_size)
        self.max_context = -(-room // page_size) * page_size
        slots = max_requests * self.max_context
        self.table = torch.arange(slots, dtype=torch.int32, device=self.device).view(max_requests, -1)
        self.pages = Paged(target.config, page_size, slots, weight.dtype, str(self.device))
        self.draft_pages = Paged(head.config, page_size, slots, weight.dtype, str(self.device))

        def make(spec: AttentionSpec, limits: Limits, device: torch.device):
            return select_backend(spec, limits, device, attention_backend=backend)

        sizes = {"max_batch_size": max_requests, "max_seqlen": self.max_context}
        limits = Limits(**sizes, max_num_tokens=max_requests * max_tokens, max_tokens_per_request=num_tokens)
        self.backend = make(self.pages.spec, limits, self.device)
        self.draft_backend = make(self.draft_pages.spec, limits, self.device)
        options = {"topk": topk, "draft_steps": draft_steps}
        self.loop = None
        if draft_steps > 1:
            self.loop = MultiStepDraftBackend(make, self.draft_pages.spec, Limits(**sizes), self.device, **options)
        self.depths: Counter[int] = Counter()  # verify steps by how many drafts they accepted
        self.graphs = None
        if graphs:
            state = StaticInput((head.config.d_model,), weight.dtype, per="request")
            first = self.loop or make(self.draft_pages.spec, Limits(**sizes), self.device)  # what a graph begins with
            shared = {"inputs": {"state": state}, "layers": {}, "recorder": recorder}
            self.graphs = GraphRunner(self._step, first, self.table, self.draft_pages.pool, **shared)
            self.graphs.capture(progress=False)

    @torch.no_grad()
    def run(self, prompts: list[list[int]], max_new: int) -> list[list[int]]:
        """The new bytes of each prompt."""
        answers: list[list[int]] = [[] for _ in prompts]
        bonus, state = self._prefill(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=self.device)
        for answer, token in zip(answers, bonus.tolist()):
            answer.append(token)
        alive = [row for row, answer in enumerate(answers) if not _is_done(answer, max_new)]
        keep = torch.tensor(alive, device=self.device)
        bonus, state, lengths = bonus[keep], state[keep], lengths[keep]
        while alive:
            batch = self._loop_batch(keep, lengths)
            if self.graphs is not None:
                done = self.graphs.replay(bonus, batch, state=state)
            else:
                if self.loop is not None:
                    self.loop.init_forward_metadata(batch)
                done = self._step(bonus, batch.positions, batch, state=state)
            state, bonus, lengths = done["state"], done["bonus"], done["lengths"]
            predicts, still = done["predicts"].flatten().tolist(), []
            for place, (row, path) in enumerate(zip(alive, done["accept_index"].tolist())):
                taken = [node for node in path if node >= 0]
                self.depths[len(taken) - 1] += 1
                answers[row] += [predicts[node] for node in taken]
                if not _is_done(answers[row], max_new):
                    still.append(place)
            kept = torch.tensor(still, device=self.device, dtype=torch.int64)
            alive = [alive[place] for place in still]
            keep, bonus, state, lengths = keep[kept], bonus[kept], state[kept], lengths[kept]
        return [_cut(answer, max_new) for answer in answers]

    def _step(self, bonus: Tensor, positions: Tensor, batch: AttentionBatch, *, state: Tensor) -> dict[str, Tensor]:
        """A step of B requests from their last tokens on, with nothing read on the host: what a graph holds.

        Args:
            bonus, state: As of `propose`. batch: The loop's, which is prepared.

        Returns:
            A row a request: what came out (`predicts` and `accept_index`, as of `Verified`), and what the next step
            begins with (`bonus`, `state` and `lengths`).
        """
        verify, verified, hidden = self._verify(batch, self._draft(batch, bonus, state))
        keep_accepted(verified, verify)
        draft = DraftInput.after_verify(verified, hidden, batch)
        return {
            "predicts": verified.predicts.view(batch.batch_size, -1),
            "accept_index": verified.accept_index,
            "bonus": draft.bonus_token,
            "state": self._extend_draft(draft, batch)[draft.last_row],
            "lengths": draft.new_seqlens,
        }

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The bytes after the prompts, and the draft head's states there."""
        counts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=self.device)
        positions = torch.cat([torch.arange(len(prompt), device=self.device) for prompt in prompts])
        rows = torch.arange(len(prompts), device=self.device)
        flat = torch.cat([self.table[row, : len(prompt)] for row, prompt in enumerate(prompts)]).long()
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)

        def batch(pages: Paged, backend) -> AttentionBatch:
            return AttentionBatch(
                forward_mode=ForwardMode.EXTEND,
                req_pool_indices=rows,
                cache_seqlens=counts,
                num_tokens=len(ids),
                req_to_token=self.table,
                out_cache_loc=flat,
                extend_seq_lens=counts,
                max_seqlen_q=max(len(prompt) for prompt in prompts),
                positions=positions,
                token_to_kv_pool=pages.pool,
                attn_backend=backend,
            )

        hidden = self._run_target(ids, batch(self.pages, self.backend))
        last = counts.long().cumsum(0) - 1
        bonus = self.target.output(hidden[last]).float().argmax(-1)
        shifted = ids.roll(-1)
        shifted[last] = bonus
        return bonus, self._run_head(shifted, hidden, batch(self.draft_pages, self.draft_backend))[last]

    def _run_target(self, ids: Tensor, batch: AttentionBatch) -> Tensor:
        self.backend.init_forward_metadata(batch)
        return self.target.hidden(ids, batch.positions, self.pages.attend(batch))

    def _run_head(self, ids: Tensor, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        self.draft_backend.init_forward_metadata(batch)
        return self.head(ids, hidden, batch.positions, self.draft_pages.attend(batch))

    def _loop_batch(self, rows: Tensor, lengths: Tensor) -> AttentionBatch:
        return AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=rows,
            cache_seqlens=lengths + 1,
            num_tokens=len(rows),
            req_to_token=self.table,
            out_cache_loc=torch.zeros_like(rows),
            positions=lengths.long(),
            token_to_kv_pool=self.draft_pages.pool,
            attn_backend=self.loop,
        )

    def _draft(self, batch: AttentionBatch, bonus: Tensor, state: Tensor) -> VerifyInput:
        sizes = {"topk": self.topk, "draft_steps": self.draft_steps, "num_tokens": self.num_tokens}
        return propose(self.head, self.loop, self.draft_pages, batch, bonus, state, **sizes)

    def _verify(self, batch: AttentionBatch, drafts: VerifyInput):
        """(the verify step, what came out, the target's hidden states)."""
        step = drafts.prepare_for_verify(batch, self.pages.pool, self.backend)
        hidden = self._run_target(drafts.draft_token, step)
        return step, drafts.verify(self.target.output(hidden).float().argmax(-1)), hidden

    def _extend_draft(self, draft: DraftInput, batch: AttentionBatch) -> Tensor:
        step = draft.prepare_for_extend(batch, self.draft_pages.pool, self.draft_backend)
        return self._run_head(draft.input_ids, draft.hidden_states, step)

    def mean_accepted(self) -> float:
        """Bytes per verify step."""
        return sum((depth + 1) * count for depth, count in self.depths.items()) / max(self.depths.total(), 1)


def _is_done(answer: list[int], max_new: int) -> bool:
    return len(answer) >= max_new or END_OF_TEXT in answer


def _cut(answer: list[int], max_new: int) -> list[int]:
    answer = answer[:max_new]
    return answer[: answer.index(END_OF_TEXT)] if END_OF_TEXT in answer else answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--topk", type=int, default=1, help="branches of a draft")
    parser.add_argument("--steps", type=int, default=5, help="tokens of a branch")
    parser.add_argument("--tokens", type=int, default=0, help="of a tree, the bonus token included; 0: steps + 1")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--backend", default=None, help="by default the best that this machine has")
    parser.add_argument("--requests", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--graphs", action="store_true", help="a step is one CUDA graph")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    if options.graphs and torch.device(options.device).type != "cuda":
        parser.error(f"--graphs records CUDA graphs, but --device is {options.device}")
    target = load_model(WEIGHTS / "gqa.safetensors", getattr(torch, options.dtype), options.device)
    assert isinstance(target, GqaModel)
    head = load_draft(WEIGHTS / "gqa_draft.safetensors", target)
    prompts = [encode(PROMPTS[i % len(PROMPTS)].text) for i in range(options.requests)]
    speculator = Speculator(
        target,
        head,
        topk=options.topk,
        draft_steps=options.steps,
        num_tokens=options.tokens or options.steps + 1,
        page_size=options.page_size,
        max_requests=len(prompts),
        max_tokens=max(map(len, prompts)) + options.max_new_tokens,
        backend=options.backend,
        graphs=options.graphs,
    )
    begin = time.monotonic()
    answers = speculator.run(prompts, options.max_new_tokens)
    seconds = time.monotonic() - begin
    print(decode(prompts[0])[-60:] + "|" + decode(answers[0]), end="\n\n")
    print(f"{sum(map(len, answers))} bytes in {seconds:.1f} s, {speculator.mean_accepted():.2f} bytes per verify step")
    for depth in range(speculator.path_length):
        share = speculator.depths[depth] / speculator.depths.total()
        print(f"  {depth} drafts accepted {share:6.1%} {'#' * round(50 * share)}")
    if options.dtype == "float32":
        plain = [list(generate(target, prompt, options.max_new_tokens)) for prompt in prompts]
        if answers != plain:
            raise SystemExit("the text differs from plain decoding")
        print("the same bytes as plain decoding")


if __name__ == "__main__":
    main()
