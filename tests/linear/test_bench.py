"""benchmarks/bench_linear.py on a CPU: errors against float64, the form that backends take, and turns."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from attnops import ops
from attnops.compat import flashinfer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_linear
import linear_timing
from linear_cells import Model
from linear_peers import PeerCall, Peers
from records import Record

GDN = Model("GDN test", 2, 4, 128, 128)
KDA = Model("KDA test", 2, 2, 64, 32, channels=True)


class Rounded:
    """A peer that computes prompts with keys of four bits less, and no other peer."""

    def delta_prompts(self, q, k, v, a, b, A_log, bias, states, slots, bounds):
        pool, coarse = torch.zeros(states.shape), (k.float() * 9).round() / 9
        given = {"states": pool, "cu_seqlens": bounds, "prefix_lens": torch.zeros_like(slots), "state_indices": slots}

        def call():
            floats = [x.float() for x in (q, coarse, v, a, b)]
            return ops.delta_prefill(*floats, A_log=A_log, dt_bias=bias, **given), pool

        return {"rounded": PeerCall(call, lambda found: found)}

    def conv_delta_step(self, *_):
        return {}


def rows_of(bench):
    return {row.peer: row for row in bench.records}


@pytest.mark.parametrize("model", [GDN, KDA])
def test_errors_of_both_are_against_float64(model, monkeypatch):
    monkeypatch.setattr(linear_timing, "AGREE", 0.3)
    bench = bench_linear.Bench("cpu", 1, Rounded())
    bench.prefill(model, [70, 3, 66], 0)
    found = rows_of(bench)
    assert found["attnops"].rel_err < 6e-3 < 2e-2 < found["rounded"].rel_err
    assert "error" in found["attnops"].note and "differs by" in found["rounded"].note


def test_long_prompts_have_no_error(monkeypatch):
    monkeypatch.setattr(bench_linear, "EXACT", 60)
    bench = bench_linear.Bench("cpu", 1, Rounded())
    bench.prefill(KDA, [61], 0)
    assert rows_of(bench)["attnops"].rel_err is None


@pytest.mark.parametrize("one", [True, False])
def test_attnops_is_the_form_that_backends_take(one, monkeypatch):
    monkeypatch.setattr(bench_linear, "takes_one_launch", lambda *_: one)
    monkeypatch.setattr(bench_linear, "POOL", 2**18)
    calls, joined = [], ops.delta_conv_decode
    monkeypatch.setattr(ops, "delta_conv_decode", lambda *args, **given: calls.append(0) or joined(*args, **given))
    bench = bench_linear.Bench("cpu", 1)
    bench.conv_decode(KDA, 2, torch.float32)
    assert set(rows_of(bench)) == {"attnops", f"attnops, {'two launches' if one else 'one launch'}"}
    assert calls and not any(not row.peer.startswith("attnops") for row in bench.records)


def test_a_cpus_floor_is_a_copy_in_the_same_turns():
    bench = bench_linear.Bench("cpu", 3)
    bench.decode(KDA, 2, torch.float32, 2**18)
    (row,) = bench.records
    floor, share = map(float, re.fullmatch(r"floor ([\d.]+) us, ([\d.]+) of it", row.note).groups())
    assert row.peer == "attnops" and abs(floor / 1e3 / row.ms - share) < 0.1


@pytest.mark.parametrize("tree", [False, True])
def test_convolutions_of_drafts_are_timed(tree, monkeypatch):
    given, update = [], ops.causal_conv1d_update
    monkeypatch.setattr(ops, "causal_conv1d_update", lambda *args, **more: given.append(more) or update(*args, **more))
    bench = bench_linear.Bench("cpu", 1)
    bench.convolve_drafts(2, 5, 16, tree)
    (row,) = bench.records
    assert row.case == "causal_conv1d_drafts" and "floor" in row.note and given[0]["windows"].shape == (2, 5, 16, 3)
    mask = given[0]["tree_mask"]
    assert (mask is None) != tree and (mask is None or mask[1].flatten().tolist() == [1, 3, 5, 11, 19])


class Named(Peers):
    """Nothing is looked for."""

    def __init__(self):
        pass

    def __getattr__(self, name):
        return None


def test_flashinfers_names_are_called_as_its_signatures_say(monkeypatch):
    """By the functions of `attnops.compat`, which take its arguments: decode, prompts, and drafts with snapshots."""
    monkeypatch.setattr(bench_linear, "POOL", 2**23)
    peers = Named()
    peers.flashinfer_step = flashinfer.gated_delta_rule_decode_pretranspose
    peers.flashinfer_gdn = flashinfer.chunk_gated_delta_rule
    peers.flashinfer_drafts = flashinfer.gated_delta_rule_mtp
    peers.norm = lambda x: (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
    softplus = torch.nn.functional.softplus
    peers.gating = lambda A_log, a, b, bias: ((-A_log.exp() * softplus(a + bias))[None], b.sigmoid()[None])
    bench = bench_linear.Bench("cpu", 1, peers)
    for kept in (torch.float32, torch.bfloat16):
        bench.decode(GDN, 2, kept, 2**22)
        bench.verify(2, 3, False, GDN, kept)
    bench.prefill(GDN, [70, 30], 0)
    assert not bench.failed
    found = {(row.case, row.params.get("states"), row.peer) for row in bench.records if "FlashInfer" in row.peer}
    assert {case for case, _, _ in found} == {"linear_decode", "linear_verify_commit", "linear_prefill"}
    assert len(found) == 5
    bench.verify(2, 3, True, GDN)
    assert bench.records[-2].case == "linear_verify_commit" and bench.records[-2].peer == "attnops", "chains alone"


def test_the_summary_counts_the_best_peer(capsys):
    bench = bench_linear.Bench("cpu", 1)
    for name, ms in (("attnops", 2.0), ("attnops, one launch", 1.0), ("FLA", 3.0), ("SGLang", 1.5)):
        bench.records.append(Record("linear_decode", name, {"batch": 1}, ms=ms))
    bench.summary()
    told = capsys.readouterr().out
    assert "1 cells, all: best peer 0.75x" in told and "below 0.97x: 0.75x SGLang" in told
