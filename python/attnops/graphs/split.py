"""A `torch.compile` backend that splits a model at its attention: pieces are compiled, attention runs eagerly."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_map_only

from attnops.graphs.recorder import Recorder, RecorderFactory, borrower

# Where a model is cut: for the options of other compiler backends, too (vLLM's `splitting_ops`, Inductor's
# `custom_should_partition_ops`).
SPLIT_OP = "attnops::unified_attention_with_output"
SPLIT_OPS = (SPLIT_OP, "attnops::unified_linear_attention_with_output")  # of models with linear layers, both

# A compiler backend: (graph, example inputs) -> callable.
Compiler = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]


class PiecewiseBackend:
    """``torch.compile(model, backend=PiecewiseBackend("inductor"), fullgraph=True)``.

    The model is traced once, with a symbolic number of tokens where its inputs are marked dynamic. Each piece between
    two attentions is then compiled for each number of tokens that it meets, with static shapes.

    Args:
        inner: The compiler of the pieces: "eager", "aot_eager", "inductor", any name that torch knows, or a callable.
        recorder: Makes a recorder per piece and number of tokens; None: pieces are not recorded. Recorded pieces need
            their inputs where they were at the first call, as `PiecewiseRunner` has them. They run in the order in
            which they were recorded. Weights are taken to stay where they are, as with any graph.
        measure: Entered around each recording.

    Attributes:
        num_graphs: Graphs that torch.compile has handed over: 1 for a model without breaks and recompilations.
        num_pieces: Pieces of those, attention not counted.
        num_compiled: Compilations of pieces.
    """

    def __init__(
        self,
        inner: str | Compiler = "eager",
        recorder: RecorderFactory | None = None,
        measure: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.inner: Compiler = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
        self.recorder, self.measure = recorder, measure
        self.num_graphs = self.num_pieces = self.num_compiled = 0

    def __call__(self, graph: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        parts, split_at = _parts(graph)
        whole = split_module(graph, graph, lambda node: parts[node], keep_original_order=True)
        for name, piece in list(whole.named_children()):
            if name.removeprefix("submod_") in split_at or not isinstance(piece, fx.GraphModule):
                continue
            setattr(whole, name, _Piece(self, piece))
            self.num_pieces += 1
        return whole.forward


def _parts(graph: fx.GraphModule) -> tuple[dict[fx.Node, int], set[str]]:
    """The part of each node, ascending in the graph's order, and the names of those that are one attention each."""
    parts: dict[fx.Node, int] = {}
    split_at: set[str] = set()
    part = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_attention(node):
            parts[node] = part + 1
            split_at.add(str(part + 1))
            part += 2
        else:
            parts[node] = part
    return parts, split_at


def _is_attention(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return node.op == "call_function" and getattr(packet, "_qualified_op_name", "") in SPLIT_OPS


class _Piece(torch.nn.Module):
    """The ops between two attentions, compiled (and recorded) for each number of tokens."""

    def __init__(self, owner: PiecewiseBackend, graph: fx.GraphModule) -> None:
        super().__init__()
        self._owner, self._graph = owner, graph
        self._runs: dict[tuple, Callable[..., Any]] = {}
        inputs = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        # Of a model's many inputs only few are not weights, which have one shape and stay where they are.
        self._sized = [place for place, value in enumerate(inputs) if _is_sized_by_step(value)]
        self._moving = [place for place, value in enumerate(inputs) if not isinstance(value, torch.nn.Parameter)]

    def forward(self, *args: Any) -> Any:
        sized = (args[place] for place in self._sized)
        key = tuple(arg if isinstance(arg, int) else arg.shape for arg in sized)
        if key not in self._runs:
            self._runs[key] = self._compile(args)
        return self._runs[key](*args)

    def _compile(self, args: tuple) -> Callable[..., Any]:
        self._owner.num_compiled += 1
        graph, is_single = _with_numbers(self._graph, args)
        compiled = self._owner.inner(graph, [arg for arg in args if isinstance(arg, Tensor)])

        def run(*args: Any) -> Any:
            outs = compiled(*(arg for arg in args if isinstance(arg, Tensor)))
            return outs[0] if is_single else outs

        recorder = self._owner.recorder
        return run if recorder is None else _RecordedPiece(recorder, run, self._moving, self._owner.measure)


def _is_sized_by_step(value: Any) -> bool:
    """Whether an input, as it was when traced, is a number or has an extent that differs between steps."""
    if not isinstance(value, Tensor):
        return True
    return any(not isinstance(extent, int) for extent in value.shape)


class _RecordedPiece:
    """Warmed up and recorded at its first call, replayed from then on; its outputs stay where they are.

    The first call hands them out as their owner. Later pieces of that step are recorded while they are alive, so the
    pool gives their memory to none of them. From then on they are borrowed, and other buckets may have the memory.
    """

    def __init__(
        self,
        recorder: RecorderFactory,
        run: Callable[..., Any],
        moving: list[int],
        measure: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._recorder, self._run, self._moving, self._measure = recorder, run, moving, measure
        self._graph: Recorder | None = None
        self._addresses: list[int] = []
        self._out: Any = None

    def __call__(self, *args: Any) -> Any:
        moving = (args[place] for place in self._moving)
        addresses = [arg.data_ptr() for arg in moving if isinstance(arg, Tensor)]
        if self._graph is None:
            return self._record(args, addresses)
        if addresses != self._addresses:
            raise ValueError(
                "attnops: a recorded piece has inputs at other addresses than it was recorded with. Copy a step's "
                "inputs into tensors that stay where they are, as PiecewiseRunner does"
            )
        self._graph.replay()
        return self._out

    def _record(self, args: tuple, addresses: list[int]) -> Any:
        self._run(*args)
        graph = self._recorder()
        with self._measure(), graph.capture():
            out = self._run(*args)
        graph.replay()
        self._graph, self._addresses = graph, addresses
        self._out = tree_map_only(Tensor, borrower(self._recorder), out)
        return out


def _with_numbers(graph: fx.GraphModule, args: tuple) -> tuple[fx.GraphModule, bool]:
    """A copy in which the numbers among the inputs are constants: a graph of static shapes, with tensors only.

    It gives a tuple, as compilers ask for; the second result says that it is one of a single output.
    """
    graph = copy.deepcopy(graph)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    numbers: dict[fx.Node, Any] = {
        node: value for node, value in zip(placeholders, args, strict=True) if not isinstance(value, Tensor)
    }

    def known(node: fx.Node) -> Any:
        return numbers.get(node, node)

    for node in graph.graph.nodes:
        node.args, node.kwargs = fx.map_arg(node.args, known), fx.map_arg(node.kwargs, known)
    for node in numbers:
        graph.graph.erase_node(node)
    for node in graph.graph.nodes:
        node.meta.pop("example_value", None)  # of the symbolic trace
    (output,) = graph.graph.find_nodes(op="output")
    is_single = not isinstance(output.args[0], (tuple, list))
    if is_single:
        output.args = ((output.args[0],),)
    graph.recompile()
    return graph, is_single
