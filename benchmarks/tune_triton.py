"""Tiles of Triton's kernels over a grid of cells: which are fastest on the GPU at hand.

    for i in 0 1 2 3 4 5 6 7; do python benchmarks/tune_triton.py compile $i 8 & done; wait    fills Triton's cache
    python benchmarks/tune_triton.py time                                                      microseconds of each

A row is (rows of a tile, keys of a step, stages, warps, peel). `bpp` is `decode.op._BLOCKS_PER_PROCESSOR`, on which the
number of splits depends. What differs from the default's output is named WRONG.
"""

import importlib
import statistics
import sys
import time

import torch
from attnops import triton_kernels as tk
from attnops.triton_kernels.core.tiles import Tiles

dop = importlib.import_module("attnops.triton_kernels.decode.op")
eop = importlib.import_module("attnops.triton_kernels.extend.op")
uop = importlib.import_module("attnops.triton_kernels.unified_extend.op")
launch = importlib.import_module("attnops.triton_kernels.core.launch")
BF16 = torch.bfloat16
PAGE = 64
CURRENT = [None]
real = launch.query_tiles


def patched(q, num_kv_heads, head_dim, v_head_dim, seqlen_q, decode):
    if CURRENT[0] is None:
        return real(q, num_kv_heads, head_dim, v_head_dim, seqlen_q, decode)
    rows, bn, st, w, peel = CURRENT[0]
    group = q.shape[-2] // num_kv_heads
    p2 = 1 << (group - 1).bit_length()
    bh = min(p2, rows)
    return Tiles(rows // bh, bh, bn, -(-group // bh), w, st, bool(peel))


for m in (dop, eop, uop):
    m.query_tiles = patched


def cache(requests, tokens, kv_heads, head_dim):
    per = -(-tokens // PAGE)
    pages = torch.randperm(requests * per, device="cuda", dtype=torch.int32).view(requests, per)
    k = torch.randn(requests * per, PAGE, kv_heads, head_dim, dtype=BF16, device="cuda")
    v = k[..., :512] if head_dim == 576 else torch.randn_like(k)
    slots = (pages.long().unsqueeze(-1) * PAGE + torch.arange(PAGE, device="cuda")).flatten(1)[:, :tokens]
    return k, v, pages, slots


class Decode:
    def __init__(self, heads, kv_heads, dim, requests, tokens):
        self.k, self.v, self.table, _ = cache(requests, tokens, kv_heads, dim)
        dv = self.v.shape[-1]
        self.q = torch.randn(requests, heads, dim, dtype=BF16, device="cuda")
        self.lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
        self.out = self.q.new_empty(requests, heads, dv)
        self.splits = torch.empty(requests, dtype=torch.int32, device="cuda")
        self.partial = torch.empty(requests, heads, 8, dv, device="cuda")
        self.lse = torch.empty(requests, heads, 8, device="cuda")
        self.kvh = kv_heads
        self.plan()

    def plan(self, fixed=False, tile=128):
        tk.triton_decode_plan(self.splits, self.lengths, 1, self.kvh, 8, tile, fixed, -1)

    def __call__(self, tile=128):
        tk.triton_decode(
            self.out,
            None,
            self.partial,
            self.lse,
            self.q,
            None,
            self.k,
            self.v,
            self.table,
            self.lengths,
            self.splits,
            1,
            0.1,
            True,
            -1,
            0.0,
            None,
            None,
            None,
            None,
            tile,
        )


class Extend:
    def __init__(self, unified, heads, kv_heads, dim, requests, cached, new):
        tokens = cached + new
        self.k, self.v, self.table, slots = cache(requests, tokens, kv_heads, dim)
        self.q = torch.randn(requests * new, heads, dim, dtype=BF16, device="cuda")
        at = slots[:, cached:].flatten()
        self.kn, self.vn = self.k.flatten(0, 1)[at].contiguous(), self.v.flatten(0, 1)[at].contiguous()
        self.lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
        self.bounds = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * new
        self.out = torch.empty_like(self.q)
        self.unified, self.hint = unified, 1 << (new - 1).bit_length()

    def __call__(self):
        if self.unified:
            tk.triton_unified_extend(
                self.out,
                None,
                self.q,
                None,
                self.k,
                self.v,
                self.table,
                self.lengths,
                self.bounds,
                self.hint,
                0.1,
                True,
                -1,
                0.0,
                None,
                None,
                None,
            )
        else:
            tk.triton_extend(
                self.out,
                None,
                self.q,
                None,
                self.kn,
                self.vn,
                self.k,
                self.v,
                self.table,
                self.lengths,
                self.bounds,
                self.hint,
                0.1,
                True,
                -1,
                0.0,
                None,
            )


GQA_CFG = [
    (16, bn, st, w, p)
    for p in (0, 1)
    for bn, st, w in (
        (64, 3, 4),
        (64, 2, 4),
        (64, 4, 4),
        (128, 2, 4),
        (128, 3, 4),
        (32, 4, 4),
        (32, 4, 2),
        (64, 3, 2),
        (128, 2, 8),
        (64, 3, 8),
    )
]
MLA16 = [
    (16, bn, st, w, p) for p in (0, 1) for bn, st, w in ((64, 2, 4), (32, 3, 4), (32, 4, 4), (32, 4, 8), (64, 2, 8))
]
MLA128 = [
    (r, bn, st, w, p)
    for p in (0, 1)
    for r, bn, st, w in (
        (64, 64, 2, 8),
        (64, 32, 3, 8),
        (64, 32, 2, 8),
        (32, 64, 2, 4),
        (32, 32, 3, 4),
        (32, 64, 2, 8),
        (128, 32, 2, 8),
    )
]
EXT = [
    (r, bn, st, w, p)
    for p in (1, 0)
    for r, bn, st, w in (
        (128, 64, 3, 8),
        (128, 64, 2, 8),
        (128, 128, 2, 8),
        (128, 64, 3, 4),
        (128, 64, 4, 8),
        (64, 64, 3, 4),
        (64, 128, 2, 4),
        (64, 64, 4, 4),
    )
]
GROUPS = [
    (
        "gqa 32/8",
        Decode,
        GQA_CFG,
        [
            (32, 8, 128, 1, 1024),
            (32, 8, 128, 1, 16384),
            (32, 8, 128, 16, 4096),
            (32, 8, 128, 64, 1024),
            (32, 8, 128, 64, 8192),
        ],
    ),
    ("mqa 8/1", Decode, GQA_CFG, [(8, 1, 128, 64, 1024), (8, 1, 128, 16, 8192)]),
    ("mha 32/32", Decode, GQA_CFG[:10], [(32, 32, 128, 16, 2048), (32, 32, 128, 64, 1024)]),
    ("mla 16", Decode, MLA16, [(16, 1, 576, 1, 8192), (16, 1, 576, 16, 4096), (16, 1, 576, 64, 2048)]),
    ("mla 128", Decode, MLA128, [(128, 1, 576, 1, 8192), (128, 1, 576, 16, 4096), (128, 1, 576, 64, 2048)]),
    (
        "extend",
        Extend,
        EXT,
        [(False, 32, 8, 128, 1, 0, 4096), (False, 32, 8, 128, 8, 4096, 512), (False, 32, 8, 128, 32, 2048, 16)],
    ),
    (
        "unified",
        Extend,
        EXT,
        [(True, 32, 8, 128, 1, 0, 4096), (True, 32, 8, 128, 8, 4096, 512), (True, 32, 8, 128, 32, 2048, 16)],
    ),
]
REP = 10


def timed(calls, rounds=5):
    graphs = {}
    for name, call in calls.items():
        CURRENT[0] = name if isinstance(name, tuple) else None
        try:
            call()
            call()
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for _ in range(REP):
                    call()
            graphs[name] = g
        except Exception as e:
            print(name, type(e).__name__, str(e)[:100])
    taken = {n: [] for n in graphs}
    for _ in range(rounds):
        for n, g in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            g.replay()
            b.record()
            b.synchronize()
            taken[n].append(a.elapsed_time(b) * 1e3 / REP)
    return {n: statistics.median(t) for n, t in taken.items()}


if sys.argv[1] == "compile":
    i, n = int(sys.argv[2]), int(sys.argv[3])
    work = [(kind, cfg, cell) for _, kind, cfgs, cells in GROUPS for cfg in [None, *cfgs] for cell in cells[:1]]
    t = time.time()
    last = None
    for kind, cfg, cell in work[i::n]:
        if last is None or last[0] != (kind, cell):
            last = ((kind, cell), kind(*cell))
        CURRENT[0] = cfg
        try:
            last[1]()
        except Exception as e:
            print(cfg, cell, type(e).__name__, str(e)[:100], flush=True)
    torch.cuda.synchronize()
    print("compiled", i, f"{time.time() - t:.1f} s", flush=True)
else:
    for title, kind, cfgs, cells in GROUPS:
        res = {}
        for cell in cells:
            problem = kind(*cell)
            CURRENT[0] = None
            problem()
            want = problem.out.clone().float()
            for cfg in cfgs:
                CURRENT[0] = cfg
                try:
                    problem.out.fill_(float("nan"))
                    problem()
                    torch.cuda.synchronize()
                    err = float((problem.out.float() - want).norm() / want.norm())
                    if not err < 0.01:
                        print("WRONG", title, cell, cfg, err)
                except Exception:
                    pass
            res[cell] = timed({"default": problem, **{c: problem for c in cfgs}})
            if kind is Decode and title[:3] in ("gqa", "mqa", "mla"):
                CURRENT[0] = None
                line = []
                for bpp in (1, 2, 4, 8, 16):
                    dop._BLOCKS_PER_PROCESSOR = bpp
                    problem.plan()
                    line.append(f"bpp{bpp}({int(problem.splits[0])})={timed({'x': problem}, 3)['x']:.1f}")
                dop._BLOCKS_PER_PROCESSOR = 2
                problem.plan(True, 256)
                print(
                    title,
                    cell,
                    *line,
                    f"fixed256({int(problem.splits[0])})="
                    f"{timed({'x': lambda problem=problem: problem(256)}, 3)['x']:.1f}",
                    flush=True,
                )
            del problem
        print("==", title, "cells", cells)
        for c in ["default", *cfgs]:
            print("  ", c, *(f"{res[cell].get(c, float('nan')):8.1f}" for cell in cells), flush=True)
