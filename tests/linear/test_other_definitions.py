"""The ops of linear attention beside other libraries' definitions in plain torch: transformers' and FLA's.

Their states are ``[B, HV, K, V]``, ours ``[slots, HV, V, K]``. Each goes on from a state, by prompts and by tokens.
"""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
from attnops import ops
from linear_reference import relative

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float32: 2e-5, torch.bfloat16: 8e-3}  # of bf16 both round their output
B, T, H, HV, K, V = 2, 70, 2, 4, 32, 24


def named(module, name):
    """A function of a model of transformers, without what may replace it by a kernel; or the test is skipped."""
    pytest.importorskip("transformers")
    path = f"transformers.models.{module}.modeling_{module}"
    found = getattr(importlib.import_module(path), name, None) if importlib.util.find_spec(path) else None
    if found is None:
        pytest.skip(f"this transformers has no {name}")
    return inspect.unwrap(found)


def indices(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Delta:
    """q, k, v, g and beta ``[B, T, heads, ...]``, and states."""

    def __init__(self, device, io, channels=False):
        heads = HV if channels else H  # Kimi's have a key for each value
        shapes = [(heads, K), (heads, K), (HV, V)]
        self.tokens = [torch.randn(B, T, *shape).to(device, io) for shape in shapes]
        self.tokens.append(-0.3 * torch.rand(B, T, HV, *([K] if channels else [])).to(device))
        self.tokens.append(torch.rand(B, T, HV).to(device))
        self.states, self.device = torch.randn(B, HV, V, K, device=device), device

    def prompts(self, first, last):
        """Out ``[B, tokens, HV, V]`` of `delta_prefill`."""
        flat = [x[:, first:last].flatten(0, 1) for x in self.tokens]
        bounds = indices([0, last - first, 2 * (last - first)], self.device)
        given = {"cu_seqlens": bounds, "prefix_lens": indices([64] * B, self.device), "states": self.states}
        out = ops.delta_prefill(*flat, state_indices=indices(range(B), self.device), **given)
        return out.unflatten(0, (B, -1))

    def steps(self, first, last):
        """The same of `delta_decode`."""
        rows, where = [], {"states": self.states, "state_indices": indices(range(B), self.device)}
        for t in range(first, last):
            rows.append(ops.delta_decode(*(x[:, t] for x in self.tokens), **where))
        return torch.stack(rows, 1)

    def check(self, function, io, form, count=T, **options):
        turned = self.states.transpose(-1, -2).clone()
        given = {"initial_state": turned, "output_final_state": True, **options}
        tokens = [x[:, :count] for x in self.tokens]
        tokens[:2] = (x.repeat_interleave(HV // x.shape[2], 2) for x in tokens[:2])  # older versions need it
        out, final = function(*tokens, **given)
        take = getattr(self, form)
        got = torch.cat([take(0, 50), take(50, count)], 1)
        assert relative(got, out) < BOUND[io] and relative(self.states, final.transpose(-1, -2)) < BOUND[io]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["prompts", "steps"])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("module", ["qwen3_next", "qwen3_5"])
def test_the_gated_delta_rule_of_transformers(module, name, form, io, device):
    function = named(module, name)
    Delta(device, io).check(function, io, form, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["prompts", "steps"])
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_kimi_delta_attention_of_transformers(name, form, io, device):
    function = named("kimi_linear", name)
    Delta(device, io, True).check(function, io, form, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("chunks", [False, True], ids=["recurrent", "chunk"])
def test_naive_code_of_fla(chunks, channels, device):
    family = "kda" if channels else "gated_delta_rule"
    module = pytest.importorskip(f"fla.ops.{family}.naive", reason="needs fla-core and einops", exc_type=ImportError)
    naive = getattr(module, f"naive_{'chunk' if chunks else 'recurrent'}_{family}")

    def function(q, k, v, g, beta, **options):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
        return naive(q=q, k=k, v=v, g=g, beta=beta, **options)

    Delta(device, torch.float32, channels).check(function, torch.float32, "prompts", count=64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", ["mamba2", "nemotron_h"])
def test_mamba2_of_transformers(module, io, device):
    """The scan of a prompt, and its step."""
    scan, update = named(module, "mamba2_chunk_scan"), named(module, "mamba2_selective_state_update")
    x, dt = torch.randn(B, T, HV, V).to(device, io), torch.randn(B, T, HV).to(device, io)
    keys = [torch.randn(B, T, H, K).to(device, io) for _ in range(2)]
    A, D, bias = -torch.rand(HV, device=device), torch.randn(HV, device=device), torch.randn(HV, device=device)
    bias = bias.to(io).float()  # which transformers rounds
    states, slots = torch.randn(B, HV, V, K, device=device), indices(range(B), device)
    options = {"D": D, "dt_bias": bias, "dt_softplus": True}
    expected, final = scan(x.float(), dt.float(), A, *(t.float() for t in keys), 16, initial_states=states,
                           return_final_states=True, **options)  # fmt: skip
    bounds = indices([0, T, 2 * T], device)
    given = {"cu_seqlens": bounds, "prefix_lens": indices([1] * B, device)}
    flat = [t.flatten(0, 1) for t in (x, dt, *keys)]
    out = ops.ssd_prefill(*flat[:2], A, *flat[2:], states=states, state_indices=slots, **given, **options)
    assert relative(out.unflatten(0, (B, T)), expected) < BOUND[io] and relative(states, final) < BOUND[io]

    z, twin = torch.randn(B, HV, V).to(device, io), states.clone()
    wide = lambda t: t.float()[..., None].expand(*t.shape, V)  # noqa: E731
    rates = A[:, None, None].expand(HV, V, K)
    expected = update(twin, x[:, 0].float(), wide(dt[:, 0]), rates, *(t[:, 0].float() for t in keys), D=wide(D),
                      dt_bias=wide(bias), dt_softplus=True, z=z.float())  # fmt: skip
    step = [t[:, 0] for t in (x, dt, *keys)]
    out = ops.ssd_decode(*step[:2], A, *step[2:], states=states, state_indices=slots, z=z, **options)
    assert relative(out, expected) < BOUND[io] and relative(states, twin) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_lightning_attention_of_minimax(device):
    """The layer without what surrounds the recurrence: prompts in blocks, and tokens that follow."""
    layer = named("minimax", "MiniMaxLightningAttention")
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 48, "num_attention_heads": HV, "num_key_value_heads": H, "head_dim": K, "vocab_size": 11}
    config = transformers.MiniMaxConfig(
        **size, num_hidden_layers=2, block_size=16, layer_types=["linear_attention"] * 2
    )
    module = layer(config, 1).to(device)
    module.norm = module.out_proj = torch.nn.Identity()
    torch.nn.init.zeros_(module.output_gate.weight)  # a gate of one half
    kept = {}

    class Cache:
        def get_linear_cache(self, layer_idx):
            return kept.get(layer_idx)

        def set_linear_cache(self, layer_idx, state):
            kept[layer_idx] = state

    x = torch.randn(B, T, 48, device=device)
    with torch.no_grad():
        whole = 2 * module(x[:, :50], None, None, Cache())[0]
        after = 2 * module(x[:, 50:], None, None, Cache())[0]
        mixed = module.act_fn(module.qkv_proj(x)).unflatten(-1, (HV, 3 * K)).split(K, -1)
    q, k, v = mixed
    states, slots = torch.full((B, HV, K, K), float("nan"), device=device), indices(range(B), device)
    rate = -module.slope_rate.flatten()
    flat = [t[:, :50].flatten(0, 1) for t in (v, k, q)]
    given = {"cu_seqlens": indices([0, 50, 100], device), "prefix_lens": indices([0, 0], device)}
    out = ops.ssd_prefill(flat[0], None, rate, *flat[1:], states=states, state_indices=slots, **given)
    assert relative(out.view(B, 50, -1), whole) < 2e-5
    for t in range(50, T):
        row = ops.ssd_decode(v[:, t], None, rate, k[:, t], q[:, t], states=states, state_indices=slots)
        assert relative(row.flatten(1), after[:, t - 50]) < 2e-5
    assert relative(states, kept[1].transpose(-1, -2)) < 2e-5
