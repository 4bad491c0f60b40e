"""benchmarks/bench_speculation.py and bench_fp4.py, small and on the CPU: they measure every bar, and go on."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "trees": {"sizes": ((64, 16), (1, 16)), "vocabulary": 50},
    "moves": {"layers": 2},
    "verify": {"batch_size": 2, "length": 128},
    "draft": {"batch_size": 2, "length": 100},
    "loop": {"sizes": (1, 32), "length": 60},
    "cross": {"batch_size": 2, "length": 70},
    "items": {"prefix": 128, "items": 4, "length": 16},
    "chunks": {"total": 512, "chunk_size": 256, "local_size": 64},
}


def module(name, monkeypatch):
    """A benchmark whose graphs are calls, each of which takes a millisecond more than the one before it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for one in ("records", "turns", "speculation_peers", name):
        monkeypatch.delitem(sys.modules, one, raising=False)
    found, turns = importlib.import_module(name), importlib.import_module("turns")

    def run(calls, rounds):
        for one in calls:
            one[0]()
        return [float(i + 1) for i, _ in enumerate(calls)]

    monkeypatch.setattr(turns, "times_in_turns", run)
    monkeypatch.setattr(found, "DEVICE", "cpu")
    return found


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_of_all_parts_has_every_bar(monkeypatch, tmp_path, capsys):
    found = module("bench_speculation", monkeypatch)
    bench = found.SpeculationBench("rows", 1, tmp_path)
    for part in found.PARTS:
        bench.part(part, lambda part=part: getattr(bench, part)(**SMALL[part]))
    assert bench.end(found.BARS) == 0, bench.failed
    assert sorted(bench.bars) == sorted(found.BARS)
    assert "not measured" not in capsys.readouterr().out
    rows = rows_of(tmp_path, "rows")
    assert len(rows) == len(bench.records) == len({json.dumps([r["case"], r["peer"], r["params"]]) for r in rows})
    assert [row["note"] for row in rows if row["case"] == "dual chunk"][
        -1
    ] == "dual chunks / causal: 2.000, bar 1.15: MISSED"


def test_rows_stay_where_a_part_or_a_peer_fails(monkeypatch, tmp_path, capsys):
    found = module("bench_speculation", monkeypatch)
    turns = importlib.import_module("turns")
    bench = found.SpeculationBench("rows", 1, tmp_path, seconds=1e9)

    def fails():
        raise RuntimeError("no such kernel")

    def half(old):
        bench.beside("a", found.ours({"n": old}, [list]), turns.Contender("peer", {"n": old}, [fails]))
        bench.cell("b", found.ours({"n": old}, [list]), turns.Contender("peer", {"n": old}, [list]))

    bench.part("old", lambda: half(1))
    assert bench.end() == 0 and len(rows_of(tmp_path, "rows")) == 3
    bench = found.SpeculationBench("rows", 1, tmp_path)
    bench.part("new", lambda: (half(2), fails()))
    bench.part("next", lambda: bench.cell("c", found.ours({}, [list])))
    assert bench.end(["a bar"]) == 1
    out = capsys.readouterr().out
    assert "left out of a: peer: 'no such kernel'" in out and "a bar: not measured" in out
    assert "failed: new (RuntimeError: 'no such kernel')" in out
    kept = {(row["case"], row["peer"], row["params"].get("n")) for row in rows_of(tmp_path, "rows")}
    both = [("a", "attnops"), ("b", "attnops"), ("b", "peer")]
    assert kept == {(*one, n) for one in both for n in (1, 2)} | {("c", "attnops", None)}
    bench.seconds = -1.0
    bench.part("late", fails)
    assert bench.failed[-1].startswith("late (not begun after")
    bench = found.SpeculationBench("rows", 1, tmp_path)  # one that ends well replaces all rows of its cases and peers
    bench.part("new", lambda: half(3))
    assert bench.end() == 0
    kept = {(row["case"], row["peer"], row["params"].get("n")) for row in rows_of(tmp_path, "rows")}
    assert kept == {(*one, 3) for one in both} | {("c", "attnops", None)}


def test_four_bits_have_every_bar(monkeypatch, tmp_path):
    found = module("bench_fp4", monkeypatch)
    bench = found.Fp4Bench("rows", 1, tmp_path)
    for heads in found.HEADS:
        bench.part(str(heads), lambda heads=heads: bench.mha(*heads, 2, 100))
    for count in found.MLA_HEADS:
        bench.part(str(count), lambda count=count: bench.mla(count, 2, 100))
    assert bench.end() == 0, bench.failed
    assert sorted(bench.bars) == ["e4m3 / fp4, 32/8 heads", "e4m3 / fp4, MLA, 16 heads"]
    assert len(rows_of(tmp_path, "rows")) == 10


class Kernel:
    """A Triton kernel of a tree, which writes what attnops does."""

    def __init__(self, call):
        self.call = call

    def __getitem__(self, grid):
        return lambda *args, **options: self.call(grid, *args, **options)


def test_kernels_of_sglang_get_their_arguments(monkeypatch):
    """As `spec_tree`, `cache_locs` and `cache_move` of SGLang declare them."""
    found = module("bench_speculation", monkeypatch)
    peers = found.peers
    from attnops import ops
    from attnops.compat import sgl_kernel

    def build(grid, parents, chosen, lengths, sums, mask, positions, *rest):
        *links, topk, depth, tokens, mode, size, wide, narrow = rest
        assert grid == (size,) and (wide, narrow) == (parents.stride(0), chosen.stride(0)) and mode == 1
        sgl_kernel.build_tree_kernel_efficient(
            parents, chosen, lengths, mask, positions, *links, topk, depth, tokens, mode
        )

    def verify(grid, *args):
        *args, size, path, tokens = args
        assert grid == (size,) and path == args[1].shape[1] and tokens == args[3].shape[1]
        sgl_kernel.verify_tree_greedy(*args)

    kernels = {"sgl_build_tree_kernel_efficient_triton": build, "verify_tree_greedy_kernel_triton": verify}
    monkeypatch.setattr(peers, "find", lambda name, modules: Kernel(kernels[name]))
    two = peers.kernels_of_trees()["SGLang, Triton"]
    given = found.draft_loop(3, 8, 4, 5, "cpu")
    tree = ops.build_draft_tree(**given)
    target = torch.randint(0, 3, (24,))
    out = ops.verify_tree_greedy(tree.tokens.view(3, 8), *tree[2:5], target, path_length=6)
    trees = peers.Trees(two, given, 5, target, (tree, out))
    assert trees.says() == "the same links and positions, the same path"

    def indices(grid, *args):
        sgl_kernel.generate_draft_decode_kv_indices[grid](*args)

    kernels["generate_draft_decode_kv_indices"] = indices
    table, rows = torch.arange(3 * 64, dtype=torch.int32).view(3, 64), torch.tensor([2, 0])
    lengths = torch.tensor([5, 17], dtype=torch.int32)
    like = (torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, 200, dtype=torch.int32))
    ops.generate_draft_decode_kv_indices(table, rows, lengths, 2, 3, 4, kv_indptr=like[0], kv_indices=like[1])
    assert peers.indices(table, rows, lengths, 2, 3, 4, like).note == "the same slots"

    seen = []
    kernels["copy_all_layer_kv_cache_tiled"] = lambda *args, **options: seen.append((args, options))
    pages = [torch.zeros(4, 4, 8, 128, dtype=torch.bfloat16) for _ in range(6)]
    one = peers.moves(pages, torch.arange(300) % 16, torch.arange(300) % 16)
    one.calls[0]()
    assert one.note == "slots given, 2 launches" and len(seen) == 2
    (grid, pointers, strides, to, at, count, most), options = seen[1]
    assert grid == (6, 16) and strides.tolist() == [2048] * 6 and (count, most, len(to), len(at)) == (44, 256, 44, 44)
    assert pointers.tolist() == [x.data_ptr() for x in pages] and options["BYTES_PER_TILE"] == 128


def test_what_is_not_found_is_told(monkeypatch, capsys):
    peers = module("bench_speculation", monkeypatch).peers
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(f"no {name}")))
    assert peers.kernels_of_trees() == {}
    assert peers.moves([], None, None) is None
    out = capsys.readouterr().out
    assert "SGLang's CUDA kernels of trees: not found (ImportError: no sgl_kernel)" in out
    assert "SGLang's copy_all_layer_kv_cache_tiled: not found (ImportError: no sglang.kernels.ops.kvcache" in out


@pytest.mark.gpu
def test_a_graph_is_timed_in_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    turns = importlib.import_module("turns")
    x, y = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 28, device="cuda")
    short, long = turns.times_in_turns([[lambda: x.add_(1)], [lambda: y.add_(1)] * 2], 5)
    assert 0 < short < long
