"""One request: what was asked, and how far it is."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt to continue.

    Args:
        prompt: Token ids, at least one.
        max_new_tokens: At least one; the end-of-text token ends a request earlier.
        arrival: Engine step at which it arrives.
        temperature, top_p, seed: Of the sampling; temperature 0 is greedy.

    Attributes:
        tokens: Prompt and output so far.
        computed: How many of them have K and V in the cache; all but the last one while it decodes.
        row: Its row of `ReqToTokenPool` while it runs, else -1.
        reused: Prompt tokens that came from the prefix cache, when it was first admitted.
        preemptions: How often it lost its pages to another one and had to start over.
        choices: Per output token (and the final end of text) the logits that it was chosen from, float32, host.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    tokens: list[int] = dataclasses.field(init=False)
    computed: int = dataclasses.field(init=False, default=0)
    row: int = dataclasses.field(init=False, default=-1)
    reused: int = dataclasses.field(init=False, default=0)
    preemptions: int = dataclasses.field(init=False, default=0)
    finish_reason: str = dataclasses.field(init=False, default="")
    choices: list[Tensor] = dataclasses.field(init=False, default_factory=list)
    admitted_at: float = dataclasses.field(init=False, default=0.0)
    finished_at: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not self.prompt or self.max_new_tokens < 1:
            raise ValueError(f"request {self.id} needs a prompt and max_new_tokens of at least 1")
        self.tokens = list(self.prompt)
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def pending(self) -> int:
        """Tokens without K and V: 1 while it decodes, more while its prompt is prefilled."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def max_len(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def admit(self, row: int, reused: int) -> None:
        if not self.admitted_at:
            self.admitted_at = time.perf_counter()
            self.reused = reused
        self.row, self.computed = row, reused

    def append(self, token: int, end_of_text: int) -> None:
        """One more output token; sets `finish_reason` when it was the last."""
        if token == end_of_text:
            self.finish_reason = "end of text"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self.max_len:
                self.finish_reason = "length"
        if self.finish_reason:
            self.finished_at = time.perf_counter()
