"""Backends, models, layers and pools, drawn within what a backend's capability declares."""

from __future__ import annotations

import torch
from attnops.backends import detect_machine, get_backend_class, registered_names
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, MLATokenToKVPool, SWAKVPool
from attnops.types import AttentionSpec, AttentionType, ForwardMode, Limits

from .draw import Draw
from .memory import FP8, FP8_KINDS
from .mla import QK
from .worlds import ROWS, World


def names_here(draw: Draw) -> list[str]:
    """Backends that run on the case's device. One that compiles or traces takes seconds a case: most do without."""
    machine = detect_machine(draw.device)
    kinds = {name: get_backend_class(name).capability for name in registered_names()}
    names = [name for name, capability in kinds.items() if not capability.machine_reasons(machine)]
    names = [name for name in names if not kinds[name].needs_cpu_seq_lens]  # worlds keep lengths on the device
    names = [name for name in names if not kinds[name].compressed]  # a world of its own
    slow = draw.chance(0.15 if draw.device == "cpu" else 0.03)
    return [name for name in names if slow or not (kinds[name].compiles_at_run_time or name == "flex_attention")]


def draw_world(draw: Draw, *, graph: bool = False) -> World:
    """A backend of those that run here, and a model that it serves."""
    names = names_here(draw)
    if graph:
        names = [name for name in names if get_backend_class(name).capability.cuda_graph]
    name = draw.pick(names)
    spec = _draw_spec(draw, name)
    capability = get_backend_class(name).capability
    modes = sorted(capability.modes)
    partner, verifies = None, draw.pick(["prefill", "decode"])
    if draw.chance(0.15):
        others = [
            other for other in names if not get_backend_class(other).capability.reasons_against(spec, list(ForwardMode))
        ]
        partner = draw.pick(others) if others and spec.attn_type is not AttentionType.ENCODER_ONLY else None
        modes = sorted(ForwardMode) if partner else modes
    if spec.attn_type is AttentionType.ENCODER_ONLY:
        modes = [ForwardMode.EXTEND]
    draw.saw(f"backend {name}", *(["backend hybrid"] if partner else []))
    draw.note(backend=name, partner=partner and f"{partner}, {verifies} verifies")
    limits = Limits(
        max_batch_size=draw.number(1, 6),
        max_seqlen=draw.pick([64, 150, 192, 300]),
        max_num_tokens=draw.number(40, 130),
        max_tokens_per_request=draw.number(1, 6),
    )
    pool, layer = _draw_pool(draw, spec, limits, capability.swa_pool), None
    layer = _draw_layer(draw, spec, pool)
    columns = limits.max_seqlen if draw.chance(0.5) else limits.max_seqlen + draw.number(0, 9)
    req_to_token = torch.zeros(ROWS, columns, dtype=torch.int32, device=draw.device)
    draw.note(spec=_text(spec), layer=(layer.layer_id, layer.sliding_window_size), limits=limits)
    return World(draw, name, partner, verifies, spec, limits, layer, pool, req_to_token, modes)


def _text(spec: AttentionSpec) -> str:
    return f"{spec}".replace(" ", "").removeprefix("AttentionSpec")


def _draw_spec(draw: Draw, name: str) -> AttentionSpec:
    capability = get_backend_class(name).capability
    options: dict[str, object] = {
        "dtype": draw.pick(sorted(capability.dtypes, key=str)),
        "page_size": draw.pick(sorted(capability.page_sizes or [1, 2, 3, 7, 16, 16, 32, 64, 64])),
        "logit_cap": draw.random.uniform(1, 20) if capability.logit_cap and draw.chance(0.2) else 0.0,
        "has_sinks": capability.sinks and draw.chance(0.25),
        "sliding_window_size": draw.number(0, 90) if capability.sliding_window and draw.chance(0.35) else -1,
        "deterministic": capability.deterministic and draw.chance(0.25),
    }
    if capability.mla and (capability.head_dims is None or draw.chance(0.35)):
        of_mla = capability.kv_dtypes if capability.mla_kv_dtypes is None else capability.mla_kv_dtypes
        kinds = [None, *sorted(of_mla & {FP8, torch.uint8}, key=str)]
        options["kv_dtype"] = draw.pick(kinds)
        if capability.mla_dtypes is not None:
            options["dtype"] = draw.pick(sorted(capability.mla_dtypes, key=str))
        options["fp8_products"] = options["kv_dtype"] == FP8 and draw.chance(0.2)
        if capability.sparse:
            options["sparse_topk"] = draw.pick([0, 1, 7, 24, 64, 64, 200])
        return AttentionSpec.mla(draw.pick([1, 3, 8, 16, 16, 64, 128]), **options)
    kv_heads = draw.pick([1, 2, 2, 3, 8])
    dims = capability.head_dims
    dim = draw.pick([32, 40, 64, 64, 128, 128, 256])
    v_dim = dim
    if dims is not None and dims.reason_against(dim, dim):
        dim = v_dim = max(dims.least, dims.multiple * (dims.most // dims.multiple) // 2)
    types = [kind for kind in capability.attn_types if kind is not AttentionType.DECODER]
    kind = draw.pick(sorted(types, key=str)) if types and draw.chance(0.15) else AttentionType.DECODER
    kinds = [kind for kind in (FP8, *FP8_KINDS) if kind in capability.kv_dtypes]  # e4m3 more often
    kv_dtype = draw.pick(kinds) if kinds and draw.chance(0.35) else None
    if kind is AttentionType.ENCODER_ONLY:
        kv_dtype = None
    options |= {"attn_type": kind, "kv_dtype": kv_dtype}
    heads = kv_heads * draw.pick([1, 2, 3, 4, 5, 8])
    spec = AttentionSpec(num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, **options)
    reasons = capability.reasons_against(spec)
    assert not reasons, f"{name}: {reasons}"
    return spec


def _draw_pool(draw: Draw, spec: AttentionSpec, limits: Limits, swa: bool):
    if spec.attn_type is AttentionType.ENCODER_ONLY:
        return None
    pages = limits.max_batch_size * limits.max_pages(spec.page_size) + draw.number(0, 3)
    size, page = pages * spec.page_size, spec.page_size
    if spec.is_mla:
        return MLATokenToKVPool(size, page, spec.cache_dtype, 2, draw.device)
    shape = (page, spec.cache_dtype, spec.num_kv_heads, spec.head_dim)
    options = {"device": draw.device, "v_head_dim": spec.v_head_dim, "layout": draw.pick(["NHD", "HND"])}
    draw.note(layout=options["layout"])
    if swa and spec.sliding_window_size >= 0 and draw.chance(0.5):
        draw.saw("mode window pool")
        return SWAKVPool(size, size, *shape, [0], [1], **options)
    return MHATokenToKVPool(size, *shape, 2, **options)


def _draw_layer(draw: Draw, spec: AttentionSpec, pool: object) -> RadixAttention:
    """Layer 0 has no window, layer 1 has the model's."""
    layer_id = draw.pick([0, 1, 1])
    scales = {}
    if spec.cache_dtype in FP8_KINDS and spec.attn_type is not AttentionType.ENCODER_ONLY:
        for name in ("k_scale", "v_scale")[: 1 if spec.is_mla else 2]:
            count = 1 if spec.is_mla or draw.chance(0.5) else spec.num_kv_heads
            scales[name] = torch.tensor([0.01 + 0.04 * draw.random.random() for _ in range(count)]).to(
                draw.device, non_blocking=True
            )
    dim = QK if spec.is_mla else spec.head_dim
    return RadixAttention(
        spec.num_q_heads,
        spec.head_dim,
        dim**-0.5 * draw.random.uniform(0.5, 2.0),
        spec.num_kv_heads,
        layer_id,
        logit_cap=spec.logit_cap,
        v_head_dim=spec.v_head_dim,
        sliding_window_size=spec.sliding_window_size if layer_id else -1,
        sinks=2 * draw.normal(spec.num_q_heads).to(draw.device, non_blocking=True) if spec.has_sinks else None,
        attn_type=spec.attn_type,
        **scales,
    )
