"""Lists of rows at random for steps, and the answer of a layer that attends to them, from what the pool then holds."""

from __future__ import annotations

import dataclasses

import torch
from attnops import reference
from attnops.types import AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from steps import Model, Step

TOPK = 24
MODELS = [
    Model("bf16", AttentionSpec.mla(8, page_size=16, sparse_topk=TOPK), scale=0.1),
    Model("fp16_page7", AttentionSpec.mla(3, page_size=7, dtype=torch.float16, sparse_topk=TOPK), scale=0.1),
    Model("rows", AttentionSpec.mla(70, page_size=64, kv_dtype=torch.uint8, sparse_topk=TOPK), scale=0.1),
    Model("sinks", AttentionSpec.mla(5, page_size=1, has_sinks=True, sparse_topk=TOPK), scale=0.1),
    Model(
        "index_keys",
        AttentionSpec.mla(8, page_size=16, sparse_topk=TOPK),
        scale=0.1,
        options={"index_keys": True},
    ),
    Model("deterministic", AttentionSpec.mla(16, page_size=16, deterministic=True, sparse_topk=TOPK), scale=0.1),
]
SHAPES = {
    "decode": (ForwardMode.DECODE, ([0, 1, 0, 2], [1] * 4), ([63, 64, 150, 17], [1] * 4), {"uniform": True}),
    "extend": (ForwardMode.EXTEND, ([0, 0, 0], [4, 30, 20]), ([0, 65, 100], [33, 1, 20]), {}),
    "mixed": (ForwardMode.MIXED, ([3, 1, 0], [1, 1, 12]), ([90, 33, 16], [1, 12, 1]), {}),
    "verify": (ForwardMode.TARGET_VERIFY, ([0, 1, 2], [5] * 3), ([59, 100, 0], [5] * 3), {"uniform": True}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [3] * 3), ([62, 7, 130], [3] * 3), {"uniform": True}),
    "draft_extend_ragged": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [1, 3, 2]), ([62, 7, 130], [3, 2, 1]), {}),
}


def lists_of(step: Step, seed: int = 0) -> torch.Tensor:
    """int32 ``[num_tokens, sparse_topk]``: slots at random of what each token may see, itself included, then -1."""
    generator, batch, topk = torch.Generator().manual_seed(seed), step.batch, step.model.spec.sparse_topk
    lists = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    new = [batch.tokens_per_request] * batch.batch_size if batch.is_uniform else batch.extend_seq_lens.tolist()
    token = 0
    for request, count in enumerate(new):
        row = batch.req_to_token[batch.req_pool_indices[request]]
        for i in range(count):
            seen = int(batch.cache_seqlens[request]) - count + i + 1
            chosen = torch.randperm(seen, generator=generator)[: min(seen, topk)]
            lists[token, : len(chosen)] = row[chosen]
            token += 1
    return lists


def with_lists(step: Step, seed: int = 0) -> Step:
    """The step of a sparse layer, which `run` then gives its lists."""
    return dataclasses.replace(step, lists=lists_of(step, seed))


def expected(step: Step, lists: torch.Tensor) -> torch.Tensor:
    """float64 ``[num_tokens, H, 512]``, zeros of tokens without rows: on the CPU, of a step whose rows are stored."""
    pages = step.batch.token_to_kv_pool.get_latent_buffer(step.layer.layer_id).flatten(0, 1).cpu()
    rows = reference.unpack_mla_fp8_rows(pages) if pages.dtype == torch.uint8 else pages.double()
    out = torch.zeros(len(lists), step.layer.num_heads, 512, dtype=torch.float64)
    for token, row in enumerate(lists.cpu()):
        keys = rows[row[row >= 0].long()]
        if not len(keys):
            continue
        scores = step.layer.scaling * step.q[token].cpu().view(-1, 576).double() @ keys.T
        total = scores.logsumexp(-1)
        if step.layer.sinks is not None:
            total = torch.logaddexp(total, step.layer.sinks.double().cpu())
        out[token] = (scores - total.unsqueeze(-1)).exp() @ keys[:, :512]
    return out


def answer(step: Step) -> torch.Tensor:
    """What a step that has run should have given: with lists by them, else `expected` of the step."""
    return step.expected if step.lists is None else expected(step, step.lists)


def check(step: Step, lists: torch.Tensor, out: torch.Tensor) -> None:
    """Of the step's own tokens, not of padding."""
    real = slice(0, step.num_real)
    error = relative_error(out[real].cpu(), expected(step, lists)[real])
    assert error <= MAX_RELATIVE_ERROR[step.model.spec.dtype], error
