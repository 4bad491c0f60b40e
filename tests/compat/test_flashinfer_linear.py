"""FlashInfer's linear attention by name, against float64 token by token."""

from __future__ import annotations

import itertools

import pytest
import torch
from attnops.compat import flashinfer
from linear_reference import delta_gates, delta_step, relative, ssd_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
B, H, HV, K, V = 3, 2, 4, 64, 32


class Drafts:
    """Tokens of three requests, a pool of seven slots, and what float64 makes of them; request 1 is padding."""

    def __init__(self, count, io=torch.bfloat16, kept=torch.float32, device="cpu"):
        torch.manual_seed(count)
        self.device, self.slots = device, [4, -1, 0]
        self.q, self.k = (torch.randn(B, count, H, K).to(io) for _ in range(2))
        self.v = torch.randn(B, count, HV, V).to(io)
        self.a, self.b = (torch.randn(B, count, HV).to(io) for _ in range(2))
        self.rate, self.bias = torch.randn(HV), torch.randn(HV)
        self.pool = torch.randn(7, HV, V, K).to(kept)
        wide = [x.double() for x in (self.q, self.k, self.v, self.a, self.b, self.rate, self.bias)]
        flat = (x.flatten(0, 1) for x in wide[3:5])
        g, beta = (x.unflatten(0, (B, count)) for x in delta_gates(*flat, *wide[5:], 0.0))
        S = self.pool[[4, 1, 0]].double()
        self.out, self.after = torch.zeros(B, count, HV, V, dtype=torch.float64), []
        for t in range(count):
            S, self.out[:, t] = delta_step(S, *(x[:, t] for x in (*wide[:3], g, beta)), K**-0.5, True)
            self.after.append(S)
        self.out[1] = 0

    def tensors(self):
        made = {"q": self.q, "k": self.k, "v": self.v, "A_log": self.rate, "a": self.a, "b": self.b}
        made |= {"dt_bias": self.bias, "pool": self.pool.clone(), "slots": torch.tensor(self.slots)}
        return {name: tensor.to(self.device) for name, tensor in made.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4])
def test_decode_of_a_pool(count, kept, device):
    case = Drafts(count, kept=kept, device=device)
    given = case.tensors()
    pool, slots = given.pop("pool"), given.pop("slots")
    targets = torch.tensor([5, -1, 0], device=device)
    options = {"initial_state": pool, "initial_state_indices": slots, "output_state_indices": targets}
    out, same = flashinfer.gated_delta_rule_decode_pretranspose(state=None, **given, **options)
    assert same is pool and relative(out, case.out) < BOUND[torch.bfloat16] and not out[1].any()
    assert relative(pool[[5, 0]], case.after[-1][[0, 2]]) < BOUND[kept]
    assert torch.equal(pool[[1, 2, 3, 4, 6]].cpu(), case.pool[[1, 2, 3, 4, 6]]), "read, or not named"


@pytest.mark.parametrize("device", DEVICES)
def test_decode_of_states_in_order(device):
    case = Drafts(1, device=device)
    given = case.tensors()
    pool, _ = given.pop("pool"), given.pop("slots")
    state = pool[[4, 1, 0]]
    turned, written = state.transpose(-1, -2).contiguous(), torch.empty_like(given["v"])
    flashinfer.gated_delta_rule_decode_pretranspose(state=state, output=written, **given)
    live = [0, 2]
    assert relative(written[live], case.out[live]) < BOUND[torch.bfloat16]
    assert relative(state[live], case.after[0][live]) < 1e-5
    out, same = flashinfer.gated_delta_rule_decode(state=turned, **given)
    assert same is turned and torch.equal(out, written) and torch.equal(turned, state.transpose(-1, -2))


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_and_their_states(device):
    case = Drafts(4, device=device)
    live = [0, 2]

    def run(**options):
        given = case.tensors()
        pool, slots = given.pop("pool"), given.pop("slots")
        out, same = flashinfer.gated_delta_rule_mtp(initial_state=pool, initial_state_indices=slots, **given, **options)
        assert same is pool and relative(out, case.out) < BOUND[torch.bfloat16]
        return pool.cpu()

    snapshots = torch.full((B, 5, HV, V, K), 7.0, device=device)
    assert torch.equal(run(intermediate_states_buffer=snapshots), case.pool), "states are only read by default"
    for t in range(4):
        assert relative(snapshots[live, t], case.after[t][live]) < 1e-5
    assert (snapshots[1] == 7).all() and (snapshots[:, 4] == 7).all()
    assert relative(run(disable_state_update=False)[[4, 0]], case.after[3][live]) < 1e-5
    cells = torch.tensor([[1, 2, 3, 5], [-1] * 4, [-1, -1, -1, 6]], device=device)
    pool = run(ssm_state_indices=cells, disable_state_update=False)
    for t, slot in enumerate([1, 2, 3, 5]):
        assert relative(pool[slot], case.after[t][0]) < 1e-5
    assert relative(pool[[4, 0, 6]], case.after[3][[0, 2, 2]]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooled", [False, True])
def test_prompts_with_checkpoints(pooled, device):
    torch.manual_seed(1)
    bounds, io = [0, 300, 300, 429], torch.bfloat16
    q, k = (torch.randn(429, H, K).to(io) for _ in range(2))
    v, alpha, beta = torch.randn(429, HV, V).to(io), torch.rand(429, HV), torch.rand(429, HV)
    alpha[5] = 0
    initial, slots = torch.randn(6, HV, V, K), [2, 0, 5] if pooled else [0, 1, 2]
    starts, kept = torch.tensor([0, 2, 2, 3]), torch.zeros(3, HV, V, K, device=device)
    given = {"q": q, "k": k, "v": v, "g": alpha, "beta": beta, "cu_seqlens": torch.tensor(bounds)}
    given |= {"initial_state": (initial if pooled else initial[:3]).clone(), "checkpoint_cu_starts": starts}
    given |= {"state_indices": torch.tensor(slots)} if pooled else {}
    given = {name: tensor.to(device) for name, tensor in given.items()}
    pool = given["initial_state"].clone() if not pooled else given["initial_state"]
    options = {"output_final_state": True, "state_checkpoints": kept, "checkpoint_every_n_tokens": 128}
    out, final = flashinfer.chunk_gated_delta_rule(**given, **options, use_qk_l2norm_in_kernel=True, output_state=pool)
    assert final is pool
    rows, cells = [], iter(range(3))
    wide = [x.double() for x in (q, k, v, alpha.log(), beta)]
    for slot, (begin, end) in zip(slots, itertools.pairwise(bounds)):
        S = initial[slot : slot + 1].double()
        for t in range(begin, end):
            S, row = delta_step(S, *(x[t : t + 1] for x in wide), K**-0.5, True)
            rows.append(row)
            if (t + 1 - begin) % 128 == 0:
                assert relative(kept[next(cells)], S[0]) < BOUND[io]
        assert relative(pool[slot], S[0]) < BOUND[io]
    assert next(cells, None) is None and relative(out, torch.cat(rows)) < BOUND[io]


def test_prompts_of_more_queries_than_values():
    torch.manual_seed(0)
    q, k, v = torch.randn(70, 4, 16), torch.randn(70, 2, 16), torch.randn(70, 2, 16)
    bounds = torch.tensor([0, 70])
    out, final = flashinfer.chunk_gated_delta_rule(q, k, v, cu_seqlens=bounds, output_final_state=True)
    S, rows = torch.zeros(1, 4, 16, 16, dtype=torch.float64), []
    wide = [q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))]
    for t in range(70):
        ones = torch.ones(1, 4, dtype=torch.float64)
        S, row = delta_step(S, *(x[t : t + 1] for x in wide), 0 * ones, ones, 0.25, False)
        rows.append(row)
    assert relative(out, torch.cat(rows)) < 1e-4 and relative(final, S) < 1e-4


class Mamba:
    """Tokens of Mamba2's layer as its users have them: one number a head, expanded."""

    def __init__(self, count, device, io=torch.bfloat16):
        torch.manual_seed(2)
        heads, P, S = 4, 32, 16
        self.slots = [3, -1, 1]
        self.x, self.z = (torch.randn(B, count, heads, P).to(io) for _ in range(2))
        self.B, self.C = (torch.randn(B, count, 2, S).to(io) for _ in range(2))
        dt, self.state = torch.randn(B, count, heads).to(io), torch.randn(6, heads, P, S)
        A, D, bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
        states = self.state[[3, 0, 1]].double()
        self.out, self.after = torch.zeros(B, count, heads, P, dtype=torch.float64), []
        for t in range(count):
            now = [x[:, t].double() for x in (self.x, dt, self.B, self.C, self.z)]
            rest = [x.double() for x in (A, D, bias)]
            states, self.out[:, t] = ssd_step(
                states, now[0], now[1], rest[0], now[2], now[3], rest[1], rest[2], now[4], 1.0, True
            )
            self.after.append(states)
        self.out[1] = 0
        self.given = {
            "state": self.state.clone().to(device),
            "x": self.x.to(device),
            "dt": dt.to(device)[..., None].expand_as(self.x),
            "A": A.to(device)[:, None, None].expand(heads, P, S),
            "B": self.B.to(device),
            "C": self.C.to(device),
            "D": D.to(device)[:, None].expand(heads, P),
            "z": self.z.to(device),
            "dt_bias": bias.to(device)[:, None].expand(heads, P),
            "state_batch_indices": torch.tensor(self.slots, device=device),
            "dt_softplus": True,
        }


@pytest.mark.parametrize("device", DEVICES)
def test_selective_state_update(device):
    case = Mamba(1, device)
    given = {n: x[:, 0] if n in ("x", "dt", "B", "C", "z") else x for n, x in case.given.items()}
    before = given["state"].clone()
    out = flashinfer.selective_state_update(**given, disable_state_update=True)
    assert torch.equal(given["state"], before)
    written = torch.empty_like(out)
    given["dst_state_batch_indices"] = torch.tensor([5, 0, 1], device=device)
    assert torch.equal(flashinfer.selective_state_update(**given, out=written), out) and torch.equal(written, out)
    assert relative(out, case.out[:, 0]) < BOUND[torch.bfloat16]
    assert relative(given["state"][[5, 1]], case.after[0][[0, 2]]) < 1e-5
    assert torch.equal(given["state"][[0, 2, 3, 4]], before[[0, 2, 3, 4]]), "padding writes nowhere"
    with pytest.raises(NotImplementedError, match="A of several numbers a head"):
        flashinfer.selective_state_update(**{**given, "A": given["A"].contiguous()})
    with pytest.raises(NotImplementedError, match="num_accepted_tokens="):
        flashinfer.selective_state_update(**given, num_accepted_tokens=given["state_batch_indices"])


@pytest.mark.parametrize("device", DEVICES)
def test_selective_state_update_of_drafts(device):
    case = Mamba(3, device)
    snapshots, cells = torch.zeros(4, 3, 4, 32, 16, device=device), torch.tensor([2, 0, 3], device=device)
    options = {"intermediate_states_buffer": snapshots, "intermediate_state_indices": cells, "cache_steps": 3}
    out = flashinfer.selective_state_update(**case.given, **options)
    assert relative(out, case.out) < BOUND[torch.bfloat16]
    for t in range(3):
        assert relative(snapshots[[2, 3], t], case.after[t][[0, 2]]) < 1e-5
    assert not snapshots[[0, 1]].any() and relative(case.given["state"][[3, 1]], case.after[2][[0, 2]]) < 1e-5


def test_all_rows_may_be_padding():
    case = Drafts(4)
    given = case.tensors()
    pool, slots = given.pop("pool"), torch.full_like(given.pop("slots"), -1)
    options = {"initial_state_indices": slots, "disable_state_update": False}
    out, _ = flashinfer.gated_delta_rule_mtp(initial_state=pool, **given, **options)
    assert not out.any() and torch.equal(pool, case.pool)


def test_what_is_refused_by_name():
    case = Drafts(1)
    given = case.tensors()
    pool, slots = given.pop("pool"), given.pop("slots")
    decode = flashinfer.gated_delta_rule_decode_pretranspose
    with pytest.raises(ValueError, match="give state alone, or initial_state"):
        decode(state=pool, initial_state=pool, initial_state_indices=slots, **given)
    with pytest.raises(NotImplementedError, match="disable_state_update="):
        decode(state=pool[:3], disable_state_update=True, **given)
    with pytest.raises(NotImplementedError, match="cache_replayssm="):
        flashinfer.gated_delta_rule_mtp(initial_state=pool, initial_state_indices=slots, cache_replayssm=True, **given)
    q, v = torch.zeros(4, 1, 16), torch.zeros(4, 2, 16)
    with pytest.raises(ValueError, match="must be a multiple of 64, got 100"):
        flashinfer.chunk_gated_delta_rule(q, q, v, cu_seqlens=torch.tensor([0, 4]), checkpoint_every_n_tokens=100)
    with pytest.raises(ValueError, match="state_indices needs output_state"):
        flashinfer.chunk_gated_delta_rule(
            q, q, v, cu_seqlens=torch.tensor([0, 4]), state_indices=slots[:1], output_final_state=True
        )


@pytest.mark.parametrize("name", ["gated_delta_rule_mtp_ucache", "gated_delta_rule_mtp_ucache_flush"])
def test_names_that_are_not_served_say_what_is(name):
    told = f"attnops.compat: {name} is not served: .* attnops.ops.delta_verify and delta_commit"
    with pytest.raises(NotImplementedError, match=told):
        getattr(flashinfer, name)
    with pytest.raises(ImportError, match=told):
        exec(f"from attnops.compat.flashinfer import {name}")
    assert not hasattr(flashinfer, "gated_delta_rule_of_nobody")
