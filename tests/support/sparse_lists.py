"""The answer of a layer that attends to lists of rows, from what the pool holds after the step."""

from __future__ import annotations

import torch
from attnops import reference
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import Step


def expected(step: Step, lists: torch.Tensor) -> torch.Tensor:
    """float64 ``[num_tokens, H, 512]``; zeros of tokens without rows."""
    pages = step.batch.token_to_kv_pool.get_latent_buffer(step.layer.layer_id).flatten(0, 1)
    rows = reference.unpack_mla_fp8_rows(pages) if pages.dtype == torch.uint8 else pages.double()
    out = torch.zeros(len(lists), step.layer.num_heads, 512, dtype=torch.float64)
    for token, row in enumerate(lists):
        keys = rows[row[row >= 0].long()]
        if not len(keys):
            continue
        scores = step.layer.scaling * step.q[token].view(-1, 576).double() @ keys.T
        total = scores.logsumexp(-1)
        if step.layer.sinks is not None:
            total = torch.logaddexp(total, step.layer.sinks.double())
        out[token] = (scores - total.unsqueeze(-1)).exp() @ keys[:, :512]
    return out


def check(step: Step, lists: torch.Tensor, out: torch.Tensor) -> None:
    """Of the step's own tokens, not of padding."""
    real = slice(0, step.num_real)
    error = relative_error(out[real], expected(step, lists)[real])
    assert error <= MAX_RELATIVE_ERROR[step.model.spec.dtype], error
