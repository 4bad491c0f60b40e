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
from linear_peers import REQUESTED, PeerCall, Peers
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


def test_attnops_is_the_op_that_backends_call(monkeypatch):
    monkeypatch.setattr(bench_linear, "POOL", 2**18)
    calls, joined = [], ops.delta_conv_decode
    monkeypatch.setattr(ops, "delta_conv_decode", lambda *args, **given: calls.append(0) or joined(*args, **given))
    bench = bench_linear.Bench("cpu", 1)
    bench.conv_decode(KDA, 2, torch.float32)
    assert set(rows_of(bench)) == {"attnops", "attnops, two ops"}
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
    cases = {row.case: row.peer for row in bench.records}  # the last of each
    assert cases["linear_verify_commit"] == "attnops", "chains alone"
    assert cases["linear_draft_step"] == "attnops"


def prompts(state, bounds, **given):
    batch = len(bounds) - 1
    zeros = torch.zeros(batch, dtype=torch.int32)
    own = torch.arange(batch, dtype=torch.int32)
    return {"states": state, "cu_seqlens": bounds.int(), "prefix_lens": zeros, "state_indices": own, **given}


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):  # fmt: skip
    given = {"states": state, "state_indices": state_batch_indices, "dt_bias": dt_bias[:, 0].contiguous()}
    given["D"] = D[:, 0].contiguous()
    return ops.ssd_decode(x, dt[..., 0], A[:, 0, 0].contiguous(), B, C, dt_softplus=dt_softplus, **given)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
                              seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False):  # fmt: skip
    batch, count = x.shape[:2]
    bounds = cu_seqlens if return_varlen_states else torch.arange(batch + 1) * count
    state = torch.zeros(len(bounds) - 1, x.shape[2], x.shape[3], B.shape[3])
    flat = [t.flatten(0, 1) for t in (x, dt, B, C)]
    given = prompts(state, bounds, dt_bias=dt_bias, dt_softplus=dt_softplus)
    return ops.ssd_prefill(*flat[:2], A, *flat[2:], **given).view(x.shape), state


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):  # fmt: skip
    assert return_final_states and activation == "silu" and x.stride(1) == initial_states.stride(1) == 1
    final_states_out.copy_(initial_states)
    bounds, own = torch.arange(len(x) + 1, dtype=torch.int32), torch.arange(len(x), dtype=torch.int32)
    given = {"conv_states": final_states_out, "cu_seqlens": bounds * x.shape[2], "state_indices": own}
    out = ops.causal_conv1d(x.mT.flatten(0, 1), weight, bias, **given)
    return out.view(len(x), -1, x.shape[1]).mT, final_states_out


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                         conv_state_indices=None):  # fmt: skip
    assert activation == "silu"
    return ops.causal_conv1d_update(x, weight, bias, conv_states=conv_state, state_indices=conv_state_indices)


def flash_kda(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
              cu_seqlens=None):  # fmt: skip
    final_state.copy_(initial_state)
    gates = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "scale": scale}
    ops.delta_prefill(*(t[0] for t in (q, k, v, g, beta)), out=out[0], **gates, **prompts(final_state, cu_seqlens))


def kimi_delta_attention(q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False,
                         use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, safe_gate=False,
                         gate_lower_bound=None, a_log=None, dt_bias=None):  # fmt: skip
    assert output_final_state and use_qk_l2norm_in_kernel and use_beta_sigmoid_in_kernel and safe_gate
    gates, state = {"A_log": a_log, "dt_bias": dt_bias, "lower_bound": gate_lower_bound}, initial_state.clone()
    return ops.delta_prefill(q, k, v, g, beta, **gates, **prompts(state, cu_seqlens)), state


def test_requested_peers_are_called_as_their_signatures_say(monkeypatch):
    """By functions with the signatures of mamba_ssm, causal-conv1d, FlashKDA and cuDNN."""
    monkeypatch.setattr(bench_linear, "POOL", 2**20)
    peers = Named()
    peers.mamba_step, peers.mamba_scan = selective_state_update, mamba_chunk_scan_combined
    peers.conv1d, peers.conv1d_step = causal_conv1d_fn, causal_conv1d_update
    peers.flash_kda, peers.cudnn_kda = flash_kda, kimi_delta_attention
    bench = bench_linear.Bench("cpu", 1, peers)
    ssd, kda = Model("Mamba2 test", 2, 4, 32, 16), Model("KDA test", 2, 2, 128, 128, channels=True)
    for kept in (torch.float32, torch.bfloat16):
        bench.decode(ssd, 3, kept, 2**18)
        bench.prefill(ssd, [30, 30], 0, kept)
        bench.prefill(ssd, [30, 7], 0, kept)
    for tokens, batch, update in ((60, 1, False), (60, 3, False), (3, 3, True)):
        bench.convolve(tokens, 16, batch, update)
    bench.prefill(kda, [70, 40], 0, torch.float32, -5.0, -6.0)
    found = [row.peer for row in bench.records if row.peer != "attnops"]
    assert [found.count(name) for name in ("mamba_ssm", "mamba_ssm batch", "causal-conv1d")] == [6, 2, 3]
    assert found[-2:] == ["FlashKDA", "cuDNN"] and len(found) == 13
    assert bench.records[-1].params == {"model": "KDA test", "lengths": "2, together 110, the longest 70",
                                        "lower_bound": -5.0, "gate_bias": -6.0}  # fmt: skip
    assert bench.records[-1].rel_err < 6e-3
    bench.prefill(kda, [70], 0)
    assert bench.records[-1].peer == "attnops", "gates above a bound alone"


@pytest.mark.parametrize("request_", list(REQUESTED))
def test_a_requested_peer_that_does_not_start_is_an_error(request_, monkeypatch):
    for path, _ in REQUESTED[request_][2].values():
        for name in {path, path.split(".")[0]}:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(SystemExit, match=f"--also {request_}: {REQUESTED[request_][1]} does not start"):
        Peers(also=[request_])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--also", "mamba"], "need --peers"),
        (["--peers", "--cpu", "--also", "mambo"], "--also: expected some of mamba, .*, got mambo"),
        (["--peers", "--peer-folder", "/nowhere"], "--peer-folder: expected a folder, got /nowhere"),
    ],
)
def test_requests_that_cannot_be_met_are_errors(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_linear.py", *options])
    with pytest.raises(SystemExit) as error:
        bench_linear.main()
    assert re.search(message, f"{capsys.readouterr().err} {error.value}")


def test_the_summary_counts_the_best_peer(capsys):
    bench = bench_linear.Bench("cpu", 1)
    for name, ms in (("attnops", 2.0), ("attnops, one launch", 1.0), ("FLA", 3.0), ("SGLang", 1.5)):
        bench.records.append(Record("linear_decode", name, {"batch": 1}, ms=ms))
    bench.summary()
    told = capsys.readouterr().out
    assert "1 cells, all: best peer 0.75x" in told and "below 0.97x: 0.75x SGLang" in told
