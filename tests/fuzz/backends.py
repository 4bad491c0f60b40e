"""Right steps of backends: eager, captured by hand, and through the three runners of `graphs`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from attnops.graphs import GraphRunner, PiecewiseRunner, SegmentRunner
from attnops.types import ForwardMode
from torch import Tensor

from .draw import Draw, Void
from .judge import check_attention, check_same_bits
from .models import draw_world
from .options import set_isa
from .worlds import ROWS, UNIFORM, Shape, Step, World

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from graph_tape import GraphTape


def _judge(world: World, step: Step, out: Tensor) -> None:
    spec, draw = world.spec, world.draw
    looser = 8.0 if spec.fp8_products and draw.device != "cpu" else 1.0
    if step.lists is not None and spec.cache_dtype == torch.uint8:
        looser = 2.0  # kernels of 16 bit round a row of bytes once more, and few keys do not average that out
    draw.saw(f"mode {step.shape.mode.name}", *(["mode verify with a tree"] if step.shape.tree else []))
    check_attention(draw, out, None, step.answer, looser=looser)


def _serve(world: World, backend, step: Step, **options) -> Tensor:
    world.fill(step)
    backend.init_forward_metadata(step.batch)
    return world.run(backend, step, **options)


def _checked(draw: Draw) -> None:
    os.environ["ATTNOPS_CHECK"] = "1" if draw.chance(0.3) else "0"


def right_eager(draw: Draw) -> None:
    """Up to three steps of one backend, in any order of modes."""
    set_isa(draw)
    _checked(draw)
    world = draw_world(draw)
    backend = world.build()
    for _ in range(draw.pick([1, 1, 2, 3])):
        step = world.step(world.shape())
        apart = world.spec.is_mla and draw.chance(0.3)
        draw.note(apart=apart)
        out = _serve(world, backend, step, apart=apart)
        _judge(world, step, out)
        if world.pool is not None and step.tokens and draw.chance(0.15):
            again = world.run(backend, step, save_kv_cache=False, apart=apart)
            if "triton" in (world.name, world.partner):  # its new rows are a tile of their own, or part of a page's
                _judge(world, step, again)
            else:
                check_same_bits("the same step again, its rows stored already", out, again)
    backend.raise_on_fault()
    if world.spec.deterministic and step.shape.uniform and not step.shape.tree:
        _check_alone(world, step, out)


def _check_alone(world: World, step: Step, out: Tensor) -> None:
    """A request of a batch-invariant model has the same bits alone."""
    draw, batch, count = world.draw, step.batch, step.batch.tokens_per_request
    which = draw.number(0, batch.batch_size - 1)
    rows = slice(which * count, (which + 1) * count)
    draw.note(alone=which)
    draw.saw("mode alone in a backend")
    one = replace(
        batch,
        req_pool_indices=batch.req_pool_indices[which : which + 1],
        cache_seqlens=batch.cache_seqlens[which : which + 1].clone(),
        num_tokens=count,
        out_cache_loc=batch.out_cache_loc[rows],
        positions=batch.positions[rows],
        max_seqlen_q=0,
        max_cache_seqlen=None,
    )
    alone = replace(step, batch=one, q=step.q[rows], k=step.k[rows], v=step.v[rows])
    world.fill(step)
    backend = world.build()
    backend.init_forward_metadata(one)
    v = None if world.spec.is_mla else alone.v
    lists = {} if step.lists is None else {"topk_indices": step.lists[rows]}
    got = backend.forward(alone.q, alone.k, v, world.layer, one, **lists).view_as(out[rows])
    check_same_bits("a request alone", out[rows], got)


def _overwrite(step: Step, other: Step) -> None:
    """A step's tensors, and only their contents, become another's, as a graph runner does it."""
    for name in ("req_pool_indices", "cache_seqlens", "out_cache_loc", "extend_seq_lens", "tree_mask", "positions"):
        mine, new = getattr(step.batch, name), getattr(other.batch, name)
        if mine is not None:
            mine.copy_(new)
    for name in ("q", "k", "v", "lists"):
        if getattr(step, name) is not None:
            getattr(step, name).copy_(getattr(other, name))


def _draw_graph_shape(world: World) -> Shape:
    modes = [mode for mode in world.modes if mode is not ForwardMode.IDLE]
    return world.shape(world.draw.pick(modes))


def _needs_a_caching_allocator(draw: Draw) -> None:
    """Under memcheck torch's allocator is off, and then nothing that allocates can be captured."""
    if draw.device != "cpu" and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise Void


def right_captured(draw: Draw) -> None:
    """A step captured with one content and replayed with others."""
    _needs_a_caching_allocator(draw)
    set_isa(draw)
    _checked(draw)
    world = draw_world(draw, graph=True)
    first = world.step(_draw_graph_shape(world))
    first.batch.max_cache_seqlen = None
    backend = world.build()
    backend.init_cuda_graph_state(world.limits.max_batch_size, world.limits.max_num_tokens)
    world.fill(first)
    draw.saw("mode captured step")
    backend.init_forward_metadata_out_graph(first.batch, in_capture=True)
    graph, out = _record(draw, backend, world, first)
    for _ in range(draw.pick([1, 2])):
        other = world.step(world.shape(like=first.shape))
        other.batch.max_cache_seqlen = None
        # A graph has the bounds that it was captured with, and bounds choose kernels: equal bits need equal bounds.
        other.batch.max_seqlen_q = first.batch.max_seqlen_q
        if draw.chance(0.3):  # a step of another shape between must not disturb what the graph reads
            between = world.step(world.shape())
            _serve(world, backend, between)
        expected = _serve(world, world.build() if world.partner is None else backend, other).clone()
        world.fill(other)
        _overwrite(first, other)
        backend.init_forward_metadata_out_graph(first.batch)
        graph.replay()
        _judge(world, other, out)
        if world.partner is None and world.name != "torch_native":  # torch multiplies padded shapes in its own order
            check_same_bits("a replay and an eager step", out, expected)


def _record(draw: Draw, backend, world: World, step: Step):
    """(graph, the output that it writes)."""
    if draw.device == "cpu":
        tape = GraphTape()
        with tape.capture():
            backend.init_forward_metadata_in_graph(step.batch)
            out = world.run(backend, step)
        return tape, out
    backend.init_forward_metadata_in_graph(step.batch)
    world.run(backend, step)  # what happens once, such as making handles, must not happen in a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(step.batch)
        out = world.run(backend, step)
    return graph, out


class _Lookup(torch.nn.Module):
    """A model of one attention: q, k, v and, with `lists`, the list of a token are rows of tables."""

    def __init__(self, world: World, tokens: int, lists: bool) -> None:
        super().__init__()
        spec, device = world.spec, world.draw.device
        self.layer = world.layer
        self.is_mla = spec.is_mla
        dims = {"q": (spec.num_q_heads, spec.head_dim), "k": (spec.num_kv_heads, spec.head_dim)}
        dims["v"] = (spec.num_kv_heads, spec.v_head_dim)
        for name, shape in dims.items():
            table = torch.zeros(tokens, shape[0] * shape[1], dtype=spec.dtype, device=device)
            self.register_buffer(name, table)
        lists_of = torch.zeros(tokens, spec.sparse_topk, dtype=torch.int32, device=device) if lists else None
        self.register_buffer("lists", lists_of)

    def forward(self, input_ids: Tensor, positions: Tensor, batch=None) -> Tensor:
        q, k = self.q[input_ids], self.k[input_ids]
        v = None if self.is_mla else self.v[input_ids]
        lists = None if self.lists is None else self.lists[input_ids]
        return self.layer(q, k, v, batch, topk_indices=lists)

    def load(self, step: Step) -> Tensor:
        """Takes a step's rows; the ids that name them."""
        ids = torch.arange(len(step.q), device=step.q.device)
        for name in "qkv":
            getattr(self, name)[: len(step.q)] = getattr(step, name).flatten(1)
        if self.lists is not None:
            self.lists[: len(step.q)] = step.lists
        return ids


def right_runner(draw: Draw) -> None:
    """Steps through `GraphRunner`, `SegmentRunner` or `PiecewiseRunner`."""
    _needs_a_caching_allocator(draw)
    set_isa(draw)
    kind = draw.pick(["graph", "graph", "segments", "pieces"])
    world = draw_world(draw, graph=kind != "pieces")
    if world.pool is None and kind == "graph":
        kind = "segments"
    backend, limits = world.build(), world.limits
    lists = bool(world.spec.sparse_topk) and draw.chance(0.8)
    model = _Lookup(world, limits.max_num_tokens, lists)
    options = {"recorder": GraphTape} if draw.device == "cpu" else {}
    if kind != "graph":
        draw.saw("mode segment runner" if kind == "segments" else "mode piecewise runner")
        sizes = sorted({draw.number(2, limits.max_num_tokens), limits.max_num_tokens})
        world.fill(world.step(world.shape()))
        if kind == "pieces":
            torch._dynamo.reset()
        make = SegmentRunner if kind == "segments" else PiecewiseRunner
        runner = make(model, backend, sizes=sizes, layers={world.layer.layer_id: world.layer}, **options)
        shapes = [_draw_graph_shape(world) for _ in range(2)]
    else:
        runner, shapes = _graph_runner(draw, world, backend, model, options)
    runner.capture(progress=False)
    for shape in shapes:
        step = world.step(replace(shape, lists=lists))
        step.batch.attn_backend = backend
        step.batch.max_cache_seqlen = None
        if not shape.uniform and shape.new and not shape.padding:
            step.batch.max_seqlen_q = max(shape.new)
        world.fill(step)
        out = runner.replay(model.load(step), step.batch)
        out = out.view(-1, world.spec.num_q_heads, world.spec.v_head_dim)[: step.tokens]
        _judge(world, step, out)


def _graph_runner(draw: Draw, world: World, backend, model: _Lookup, options: dict):
    """(the runner, shapes of steps for it)."""
    draw.saw("mode graph runner")
    mode = draw.pick([mode for mode in world.modes if mode in UNIFORM])
    shape = world.shape(mode)
    most = world.limits.max_batch_size
    tokens = 1 if mode is ForwardMode.DECODE else shape.new[0] if shape.uniform else world.limits.max_tokens_per_request
    most = max(min(most, world.limits.max_num_tokens // tokens), 1)
    sizes = sorted({draw.number(1, most), most})
    world.fill(world.step(shape))
    runner = GraphRunner(
        model,
        backend,
        world.req_to_token,
        world.pool,
        sizes=sizes,
        forward_mode=mode,
        tokens_per_request=tokens,
        tree=shape.tree,
        ragged=not shape.uniform,
        padding_row=ROWS - 1,
        layers={world.layer.layer_id: world.layer},
        **options,
    )
    shapes = []
    for _ in range(2):
        count = draw.number(1, most)
        new = [tokens if shape.uniform else draw.number(1, tokens) for _ in range(count)]
        shapes.append(Shape(mode, world._prefixes(new), new, shape.uniform, shape.tree, 0))
    return runner, shapes
