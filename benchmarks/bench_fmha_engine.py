"""Chunked prefill beside decodes, as an engine does it: whole steps of a model of Llama's shape, by contender.

8 prompts of 4096 tokens come in chunks of 2048, beside 32 requests that decode over 4096 keys each. A step is one CUDA
graph: in every layer the projections, the attention of the chunk and the decodes in one call, and the feed-forward.
attnops' plan is made inside, once a step; peers plan before. Norms, rotary embedding and stores are left out: they are
the same for all. All layers share one layer's weights, which are larger than a cache.

    python benchmarks/bench_fmha_engine.py --write
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable

import bench_fmha
import fmha_peers
import torch
from fmha_cells import BF16, DEVICE, Cell, Pools
from records import Record, version_of, write

NAME = "h200-fmha-engine"
TURNS = 3


@dataclasses.dataclass
class Shape:
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    prompt: int = 4096
    chunk: int = 2048
    decodes: int = 32
    context: int = 4096
    page: int = 64
    table_tokens: int = 131072

    def cells(self) -> list[Cell]:
        """One for each chunk of a prompt."""
        ends = range(self.chunk, self.prompt + 1, self.chunk)
        q_lens, decodes = [self.chunk] + [1] * self.decodes, [self.context] * self.decodes
        options = dict(page=self.page, table_tokens=self.table_tokens)
        return [Cell(self.heads, q_lens, [end, *decodes], self.head_dim, **options) for end in ends]


class Model:
    """What surrounds the attention of each layer."""

    def __init__(self, shape: Shape) -> None:
        def weights(inner: int, outer: int) -> torch.Tensor:
            return torch.randn(inner, outer, dtype=BF16, device=DEVICE) / inner**0.5

        self.shape, attention = shape, shape.heads[0] * shape.head_dim
        self.qkv = weights(shape.hidden, (shape.heads[0] + 2 * shape.heads[1]) * shape.head_dim)
        self.out = weights(attention, shape.hidden)
        self.gate_up = weights(shape.hidden, 2 * shape.intermediate)
        self.down = weights(shape.intermediate, shape.hidden)
        self.tokens = torch.randn(shape.chunk + shape.decodes, shape.hidden, dtype=BF16, device=DEVICE)

    def step(self, attention: Callable[[int], torch.Tensor], _r: int = 0) -> torch.Tensor:
        x = self.tokens
        for layer in range(self.shape.layers):
            x @ self.qkv  # an engine would store its keys; the harness has its queries elsewhere
            x = x + attention(layer).flatten(1) @ self.out
            gate, up = (x @ self.gate_up).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ self.down
        return x


def contenders(cell: Cell) -> list[tuple[str, Callable[[], fmha_peers.Step]]]:
    named = [n for n in fmha_peers.contenders(cell) if not n[0].startswith(("attnops", "SDPA"))]
    return [("attnops", functools.partial(fmha_peers.attnops, cell, "first")), *named]


def measure(model: Model, cell: Cell, budget_ms: float) -> dict[str, float]:
    """Milliseconds of a step by contender: the median of turns."""
    ready = {}
    for name, prepare in contenders(cell):
        try:
            attention = prepare()
            error = cell.relative_error(attention(0))
            if not error < 0.02:
                raise RuntimeError(f"WRONG: relative error {error:.3g}")
            by_layer = functools.partial(_of_layer, attention, cell.rotation)
            ready[name] = bench_fmha.turn_of(functools.partial(model.step, by_layer), 1)
        except Exception as problem:  # a peer may be absent, or refuse the cell
            print(f"    {name}: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:120]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(TURNS):
        for name, turn in ready.items():
            times[name].append(statistics.median(turn(budget_ms)))
    return {name: statistics.median(of) for name, of in times.items()}


def _of_layer(attention: fmha_peers.Step, rotation: int, layer: int) -> torch.Tensor:
    """Slice 0 is the first layer's alone: there the plan is made."""
    return attention(0 if layer == 0 or rotation == 1 else 1 + (layer - 1) % (rotation - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-ms", type=float, default=400, help="of replays per contender and turn")
    parser.add_argument("--pool", type=float, default=0, help="elements of a pool")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU does in a second: to try the harness")
    parser.add_argument("--write", action="store_true", help=f"to benchmarks/results/{NAME}.jsonl")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = Shape(2, 64, 96, (4, 2), 32, 32, 16, 3, 40, 8, 128) if arguments.tiny else Shape()
    pools = Pools(*([int(arguments.pool)] if arguments.pool else []))
    model, records, totals = Model(shape), [], {}
    for cell in shape.cells():
        for name, ms in measure(model, cell.build(pools), arguments.budget_ms).items():
            print(f"chunk to {cell.k_lens[0]:6d}: {name:15s} {ms:9.3f} ms a step", flush=True)
            totals.setdefault(name, []).append(ms)
            records.append(
                Record(case="chunked prefill", peer=name, params=cell.params, ms=round(ms, 4), version=version_of(name))
            )
        vars(cell).pop("expected", None)
    whole = {name: sum(of) for name, of in totals.items() if len(of) == len(shape.cells())}
    for name, ms in whole.items():
        print(f"{name:15s} {ms:9.3f} ms a prompt, attnops takes {whole.get('attnops', ms) / ms:.3f} of it")
    if arguments.write:
        print(f"written to {write(records, NAME)}")


if __name__ == "__main__":
    main()
