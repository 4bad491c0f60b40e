"""Right calls of `attnops.compat`: the same problems as the ops', in the words and conventions of other libraries."""

from __future__ import annotations

import math
from typing import Any

import torch
from attnops import ops
from attnops.compat import flash_attn_interface, flash_mla, flashinfer, sgl_kernel
from attnops.ops.local_batches import max_local_batches
from torch import Tensor

from . import mla, xqa
from .draw import Draw, Failure, Void
from .judge import check_attention, check_lse
from .memory import FP8
from .mla import V
from .options import set_isa
from .oracle import Answer

LN2 = math.log(2)


def _gqa_names(call: xqa.Call) -> list[str]:
    """Functions that serve a call; the rarest counts twice."""
    rules, names = call.rules, []
    scaled = call.options["k_scale"] is not None or call.options["v_scale"] is not None
    known = call.k_pages.dtype in (call.q.dtype, FP8)
    if call.tree_mask is not None or not call.lengths or not _one_scale(call.options) or not known:
        return names
    dim, plain = call.q.shape[3], call.k_pages.dtype == call.q.dtype
    if not (_infinite(rules.sinks) or dim % 8 or dim < 32 or (scaled and plain)):  # many queries go to fmha
        names += ["flash_attn_with_kvcache"]
    if rules.causal and not rules.cap:
        names += ["trtllm_batch_decode_with_kv_cache"]
    if rules.causal and call.q.shape[1] == 1 and not scaled and min(call.lengths) > 0:
        names += 2 * ["BatchDecodeWithPagedKVCacheWrapper"]
    return names


def right_gqa(draw: Draw) -> None:
    """A decode call of FlashInfer or FlashAttention over K and V in pages."""
    set_isa(draw)
    for _ in range(4):
        call = xqa.draw_call(draw)
        names = _gqa_names(call)
        if names:
            break
    else:
        raise Void
    name = draw.pick(names)
    draw.note(compat=name)
    flat = call.q.flatten(0, 1)
    if name == "flash_attn_with_kvcache":
        out, lse = _flash_attention(call)
    elif name == "trtllm_batch_decode_with_kv_cache":
        out, lse = _trtllm(draw, call, flat), None
    else:
        out, lse = _wrapper(draw, call, flat)
    draw.saw(f"compat {name}")
    check_attention(draw, out.reshape(call.answer.out.shape), lse, call.answer)


def _infinite(sinks: Tensor | None) -> bool:
    return sinks is not None and bool(sinks.isinf().any())


def _one_scale(options: dict[str, object]) -> bool:
    """The peers know one scale for all heads."""
    scales = [options["k_scale"], options["v_scale"]]
    return all(scale is None or scale.numel() == 1 for scale in scales)


def _flash_attention(call: xqa.Call) -> tuple[Tensor, Tensor]:
    heads, options = call.k_pages.shape[2], call.options
    descales = {}
    for side in "kv":
        scale = options[f"{side}_scale"]
        descales[f"{side}_descale"] = None if scale is None else scale.view(1, 1).expand(len(call.lengths), heads)
    out, lse = flash_attn_interface.flash_attn_with_kvcache(
        call.q,
        call.k_pages,
        call.v_pages,
        cache_seqlens=call.seqlens,
        page_table=call.paging.table,
        softmax_scale=call.rules.scale,
        causal=call.rules.causal,
        window_size=(call.rules.window_left, -1),
        softcap=call.rules.cap,
        sinks=options["sinks"],
        return_softmax_lse=True,
        **descales,
    )
    return out, lse.transpose(1, 2).reshape(-1, call.q.shape[2])  # [B, H, S]


def _trtllm(draw: Draw, call: xqa.Call, flat: Tensor) -> Tensor:
    options = call.options
    k_scale, v_scale = (1.0 if options[f"{s}_scale"] is None else float(options[f"{s}_scale"]) for s in "kv")
    layout = draw.pick(["NHD", "HND"])
    pools = [pages if layout == "NHD" else pages.transpose(1, 2) for pages in (call.k_pages, call.v_pages)]
    return flashinfer.trtllm_batch_decode_with_kv_cache(
        flat,
        tuple(pools),
        torch.zeros(64, dtype=torch.uint8, device=flat.device),
        call.paging.table,
        call.seqlens,
        max(call.lengths),
        bmm1_scale=call.rules.scale * k_scale,
        bmm2_scale=v_scale,
        window_left=call.rules.window_left,
        sinks=options["sinks"],
        kv_layout=layout,
        q_len_per_req=call.q.shape[1],
    )


def _wrapper(draw: Draw, call: xqa.Call, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Its page tables have no cells to spare, and no request without a token."""
    page_size = call.k_pages.shape[1]
    counts = call.paging.counts
    indices = [cell for row, count in zip(call.paging.rows, counts) for cell in row[:count]]
    indptr = [sum(counts[:i]) for i in range(len(counts) + 1)]
    last = [length - (count - 1) * page_size for length, count in zip(call.lengths, counts)]
    device = flat.device

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        int32(indptr),
        int32(indices),
        int32(last),
        call.q.shape[2],
        call.k_pages.shape[2],
        call.q.shape[3],
        page_size,
        window_left=call.rules.window_left,
        logits_soft_cap=call.rules.cap or draw.pick([None, 0.0]),
        q_data_type=flat.dtype,
        kv_data_type=call.k_pages.dtype,
        sm_scale=call.rules.scale,
    )
    cache = (call.k_pages, call.v_pages)
    out, lse = wrapper.run(flat, cache, return_lse=True, sinks=call.options["sinks"])
    return out, lse * LN2


def _mla_names(call: mla.Call) -> list[str]:
    """Functions that serve a call; the rarer one counts twice."""
    rules, kind = call.rules, call.kv_pages.dtype
    plain = call.tree_mask is None and rules.window_left < 0 and not rules.cap
    if not plain or not call.lengths or call.options.get("kv_scale") is not None:
        return []
    if kind not in (call.q.dtype, torch.uint8) or call.options.get("fp8_products"):
        return []
    one_token = call.q.shape[1] == 1 and rules.sinks is None and kind == call.q.dtype and rules.causal
    return ["flash_mla_with_kvcache", *(2 * ["cutlass_mla_decode"] if one_token else [])]


def right_mla(draw: Draw) -> None:
    """A decode call of FlashMLA or sgl_kernel over latents in pages."""
    set_isa(draw)
    for _ in range(4):
        call = mla.draw_call(draw)
        names = _mla_names(call)
        if names:
            break
    else:
        raise Void
    rules, kind = call.rules, call.kv_pages.dtype
    name = draw.pick(names)
    draw.note(compat=name)
    if name == "flash_mla_with_kvcache":
        out, lse = flash_mla.flash_mla_with_kvcache(
            call.q,
            call.kv_pages.unsqueeze(2),
            call.paging.table,
            call.seqlens,
            V,
            flash_mla.get_mla_metadata()[0],
            softmax_scale=rules.scale,
            causal=rules.causal,
            is_fp8_kvcache=kind == torch.uint8,
            attn_sink=call.options["sinks"],
        )
        lse = lse.transpose(1, 2).reshape(-1, call.q.shape[2])
        lse = torch.where(lse == math.inf, -math.inf, lse)  # of a row without a key
    else:
        size = sgl_kernel.cutlass_mla_get_workspace_size(max(call.lengths), len(call.lengths), device=draw.device)
        workspace = torch.zeros(size, dtype=torch.uint8, device=draw.device)
        q = call.q.squeeze(1)
        pages = call.kv_pages
        out = sgl_kernel.cutlass_mla_decode(
            q[..., :V], q[..., V:], pages, call.seqlens, call.paging.table, workspace, rules.scale
        )
        lse = None
    draw.saw(f"compat {name}")
    check_attention(draw, out.reshape(call.answer.out.shape), lse, call.answer, lse_atol=mla.lse_slack(call))


def right_merge(draw: Draw) -> None:
    """Two states, with lse in powers of two or of e."""
    tokens, heads, dim = draw.number(0, 9), draw.pick([1, 3, 8]), draw.pick([8, 64, 128])
    outs = draw.normal(2, tokens, heads, dim).to(draw.pick([torch.float32, torch.bfloat16]))
    lses = draw.normal(2, tokens, heads) * 5
    lses[draw.normal(2, tokens, heads) > 1] = -math.inf
    total = torch.logsumexp(lses.double(), 0)
    weights = torch.exp(lses.double() - total.masked_fill(total == -math.inf, 0)).unsqueeze(-1)
    answer = Answer((weights * outs.double()).sum(0), total, (weights * outs.double()).norm(dim=-1).norm(dim=0), total)
    given: list[Any] = [tensor.to(draw.device, non_blocking=True) for tensor in (outs[0], lses[0], outs[1], lses[1])]
    if draw.chance(0.5):
        draw.saw("compat merge_state")
        given[1], given[3] = given[1] / LN2, given[3] / LN2
        out, lse = flashinfer.merge_state(*given)
        lse = lse * LN2
    else:
        draw.saw("compat merge_state_v2")
        out, lse = sgl_kernel.merge_state_v2(*given)
    check_attention(draw, out, None, answer)
    check_lse(lse, total)


def right(draw: Draw) -> None:
    draw.pick([right_gqa, right_gqa, right_mla, right_merge])(draw)


def right_chunks(draw: Draw) -> None:
    """`build_local_batches`, against chunks counted token by token."""
    draw.saw("op build_local_batches")
    page = draw.pick([1, 1, 3, 16])
    chunk = page * draw.number(1, 5)
    new = [draw.number(0, 3 * chunk) for _ in range(draw.number(0, 6))]
    seqlens = [count + draw.number(0, 4 * chunk) for count in new]
    width = max([-(-length // page) for length in seqlens], default=0) + draw.number(0, 2)
    draw.note(page=page, chunk=chunk, new=new, seqlens=seqlens)
    table = draw.permutation(max(len(new) * width, 1))[: len(new) * width].to(torch.int32).view(len(new), width)
    bounds = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    most = max_local_batches(sum(new), len(new), chunk)
    shapes = ((most + 1,), (most,), (most, chunk // page))
    out = [torch.full(shape, -7, dtype=torch.int32, device=draw.device) for shape in shapes]
    names = ("local_cu_seqlens_q", "local_cache_seqlens", "local_page_table")
    given = (x.to(draw.device, non_blocking=True) for x in (bounds, torch.tensor(seqlens, dtype=torch.int32), table))
    ops.build_local_batches(*given, page, chunk, **dict(zip(names, out)))
    firsts, keys, cells = (x.tolist() for x in out)
    expected, row = [], 0
    for b, (count, length) in enumerate(zip(new, seqlens)):
        for index in sorted({(length - count + i) // chunk for i in range(count)}):
            seen = min((index + 1) * chunk, length) - index * chunk
            mine = table[b, index * chunk // page :][: -(-seen // page)].tolist()
            expected.append((row, seen, mine + [-7] * (chunk // page - len(mine))))
            row += sum((length - count + i) // chunk == index for i in range(count))
    rest = most - len(expected)
    expected += [(row, 0, [-7] * (chunk // page))] * rest
    got = list(zip(firsts, keys, cells))
    if got != expected or firsts[-1] != row:
        raise Failure(f"the chunks are {got[:5]}, expected {expected[:5]}")


def right_ranks(draw: Draw) -> None:
    """`context_parallel_seqlens` and `context_parallel_slots`, counted one by one; or `right_chunks`."""
    if draw.chance(0.3):
        right_chunks(draw)
        return
    world, interleave = draw.number(1, 5), draw.pick([1, 1, 2, 16, 64])
    rank = draw.number(0, world - 1)
    draw.note(world=world, rank=rank, interleave=interleave)
    if draw.chance(0.5):
        draw.saw("op context_parallel_seqlens")
        seqlens = [draw.number(-3, 400) for _ in range(draw.number(0, 9))]
        count = draw.number(1, 4)
        given = torch.tensor(seqlens, dtype=torch.int32).to(draw.device, non_blocking=True)
        got = ops.context_parallel_seqlens(given, rank, world, interleave, tokens_per_request=count).tolist()
        ends = [max(length, 0) - count + token + 1 for length in seqlens for token in range(count)]
        expected = [sum(i // interleave % world == rank for i in range(end)) for end in ends]
    else:
        draw.saw("op context_parallel_slots")
        slots = [draw.number(-3, 4000) for _ in range(draw.number(0, 50))]
        kind = draw.pick([torch.int32, torch.int64])
        given = torch.tensor(slots, dtype=kind).to(draw.device, non_blocking=True)
        got = ops.context_parallel_slots(given, rank, world, interleave).tolist()
        expected = []
        for slot in slots:
            mine = slot >= 0 and slot // interleave % world == rank
            expected.append(slot // (interleave * world) * interleave + slot % interleave if mine else -1)
    if got != expected:
        raise Failure(f"the rank has {got[:20]}, expected {expected[:20]}")
