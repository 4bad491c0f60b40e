"""The demo's own test: plain PyTorch with contiguous keys and values must choose the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from models import END_OF_TEXT, GqaModel, MlaModel, contiguous_cache, sample

from .request import Request

# Largest difference of a logit (they reach 30) that rounding explains: the order of sums differs, in every layer.
LOGIT_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}

# Choices in a thousand that may fall the other way because the logits differ by rounding (at least one per run).
TIES_PER_THOUSAND = {torch.float32: 1, torch.bfloat16: 15, torch.float16: 5}


class CheckFailed(Exception):
    """A served request differs from plain PyTorch."""


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What was compared.

    Attributes:
        tokens: Choices made while serving, the end of a text included.
        ties: Those that differ although the logits agree: which, and by how much.
        largest_difference: Of any logit.
    """

    tokens: int = 0
    ties: tuple[str, ...] = ()
    largest_difference: float = 0.0

    def __add__(self, other: CheckResult) -> CheckResult:
        largest = max(self.largest_difference, other.largest_difference)
        return CheckResult(self.tokens + other.tokens, self.ties + other.ties, largest)


def check_requests(model: GqaModel | MlaModel, requests: Iterable[Request]) -> CheckResult:
    """`check_request` of all, and that rounding decided no more choices than it may.

    Raises:
        CheckFailed: the first difference that rounding does not explain.
    """
    result = sum((check_request(model, request) for request in requests), CheckResult())
    allowed = max(1, result.tokens * TIES_PER_THOUSAND[model.embedding.weight.dtype] // 1000)
    if len(result.ties) > allowed:
        raise CheckFailed(
            f"{len(result.ties)} of {result.tokens} tokens differ, more than rounding explains ({allowed}):\n  "
            + "\n  ".join(result.ties)
        )
    return result


@torch.inference_mode()
def check_request(model: GqaModel | MlaModel, request: Request) -> CheckResult:
    """Compares every choice of a finished request with the choice of plain PyTorch.

    Prompt and output go once through the model with contiguous K and V: one sequence alone, no chunks, no pages, and
    MLA's heads multiplied out. Each choice is then made again from the reference's logits, with the request's own
    random numbers. As long as the choices are equal, this is what the reference would have written by itself. A choice
    may differ only where the logits are equal up to rounding: then the two best tokens were that close.

    Raises:
        CheckFailed: naming request, position and both tokens, or the logits that are too far apart.
    """
    bound = LOGIT_BOUND[model.embedding.weight.dtype]
    device = model.embedding.weight.device
    ended = request.finish_reason == "end of text"
    served = [*request.output, END_OF_TEXT] if ended else request.output
    if len(served) != len(request.choices):
        raise CheckFailed(f"request {request.id}: {len(served)} tokens, but {len(request.choices)} sets of logits")
    known = torch.tensor(request.tokens if ended else request.tokens[:-1], device=device)
    hidden = model.hidden(known, torch.arange(len(known), device=device), contiguous_cache(model, absorbed=False))
    expected = model.output(hidden[len(request.prompt) - 1 :]).float().cpu()
    # The same random numbers twice: for the choice from the reference's logits, and for that from the served ones.
    noise, again = (torch.Generator().manual_seed(request.seed) for _ in range(2))
    ties, largest = [], 0.0
    for index, (token, logits, reference) in enumerate(zip(served, request.choices, expected)):
        choice = sample(reference, request.temperature, noise, request.top_p)
        difference = float((logits - reference).abs().max())
        largest = max(largest, difference)
        what = (
            f"request {request.id}, output token {index} (position {len(request.prompt) + index}): "
            f"served {_name(token)}, plain PyTorch {_name(choice)}; logits differ by {difference:.2g}"
        )
        if not difference <= bound:  # also when it is NaN
            raise CheckFailed(f"{what}, allowed are {bound:g}")
        if sample(logits, request.temperature, again, request.top_p) != token:
            raise CheckFailed(f"{what}; the served token does not even follow from the served logits")
        if choice != token:
            ties.append(what)
    return CheckResult(len(served), tuple(ties), largest)


def _name(token: int) -> str:
    return f"{token} ({chr(token)!r})"
