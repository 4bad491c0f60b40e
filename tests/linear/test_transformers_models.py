"""Tiny random models of transformers whose linear layers run through attnops give the tokens of transformers.

Qwen3-Next, Kimi Linear, Nemotron-H and MiniMax. Only the recurrences and convolutions change hands: projections, norms
and the layers that attend stay the model's own. Prompts come whole and in chunks, and are resumed; drafts are verified
and rolled back.
"""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
from attnops.backends import GDNAttnBackend, KDAAttnBackend, LightningAttentionBackend, Mamba2AttnBackend
from attnops.layers import RadixLinearAttention, forward_context
from attnops.pools import HybridReqToTokenPool, MambaPool
from attnops.types import AttentionBatch, ForwardMode, Limits
from linear_reference import relative

transformers = pytest.importorskip("transformers")
LIMITS = Limits(max_batch_size=2, max_seqlen=256, max_num_tokens=256, max_tokens_per_request=4)
SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "rms_norm_eps": 1e-6}
SMALL |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    config = transformers.Qwen3NextConfig(
        **SMALL, **ATTENTION, **experts, **heads, linear_value_head_dim=24, shared_expert_intermediate_size=32,
        num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR],
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def kimi_linear():
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16}
    config = transformers.KimiLinearConfig(
        **SMALL, **latent, num_attention_heads=2, num_key_value_heads=2, linear_head_dim=16, linear_num_heads=3,
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=3,
        layer_types=[LINEAR, FULL, LINEAR], mlp_layer_types=["dense", "dense", "dense"],
    )  # fmt: skip
    return transformers.KimiLinearForCausalLM(config)


def nemotron_h():
    options = {name: value for name, value in SMALL.items() if name != "rms_norm_eps"}
    config = transformers.NemotronHConfig(
        **options, **ATTENTION, layers_block_type=["mamba", "attention", "mlp", "mamba"], ssm_state_size=16,
        mamba_num_heads=4, mamba_head_dim=24, n_groups=2, chunk_size=32,
    )  # fmt: skip
    return transformers.NemotronHForCausalLM(config)


def minimax():
    config = transformers.MiniMaxConfig(
        **SMALL, **ATTENTION, num_local_experts=2, num_hidden_layers=3, block_size=32,
        layer_types=[FULL, LINEAR, LINEAR],  # its cache asks layer 0 for its length
    )  # fmt: skip
    return transformers.MiniMaxForCausalLM(config)


def serve_gdn(module, layer, x):
    q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    mixed = torch.cat([t[0].flatten(1) for t in (q, k, v)], dim=-1)
    out = layer(mixed, a[0], b[0]).unflatten(-1, (-1, module.head_v_dim))
    out = module.norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    return module.out_proj(out.reshape(1, x.shape[1], -1))


def serve_kda(module, layer, x):
    mixed = torch.cat([project(x) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    gate = module.forget_gate
    a = gate.f_b_proj(gate.f_a_proj(x)).view(x.shape[1], module.num_heads, module.head_dim)
    out = layer(mixed[0], a, module.b_proj(x)[0]).view(1, x.shape[1], module.num_heads, module.head_dim)
    out = module.o_norm(out, module.g_b_proj(module.g_a_proj(x)).view(out.shape))
    return module.o_proj(out.flatten(2))


def serve_mamba2(module, layer, x):
    gate, mixed, dt = module.in_proj(x).split([module.intermediate_size, module.conv_dim, module.num_heads], dim=-1)
    return module.out_proj(module.norm(layer(mixed[0], dt[0])[None], gate))


def serve_lightning(module, layer, x):
    heads = module.act_fn(module.qkv_proj(x)).view(x.shape[1], module.num_attention_heads, 3, module.head_dim)
    out = module.norm(layer(heads.transpose(1, 2).flatten(1))[None])
    return module.out_proj(torch.sigmoid(module.output_gate(x)) * out), None


def layer_of(module, kind, place):
    if kind == "minimax":
        heads = [module.num_attention_heads] * 2 + [module.head_dim] * 2
        return RadixLinearAttention(place, *heads, A_log=module.slope_rate.flatten().log())
    given = {"conv_weights": module.conv1d.weight.squeeze(1), "bias": module.conv1d.bias}
    if kind == "qwen3_next":
        heads = (module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return RadixLinearAttention(place, *heads, A_log=module.A_log, dt_bias=module.dt_bias, **given)
    if kind == "kimi_linear":
        heads = [module.num_heads] * 2 + [module.head_dim] * 2
        gates = {"A_log": module.forget_gate.A_log.flatten(), "dt_bias": module.forget_gate.dt_bias.view(heads[0], -1)}
        return RadixLinearAttention(place, *heads, **gates, **given)
    heads = (module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim)
    return RadixLinearAttention(place, *heads, A_log=module.A_log, dt_bias=module.dt_bias, D=module.D, **given)


# Model, its linear modules' attribute, how one runs through our layer, the backend.
KINDS = {
    "qwen3_next": (qwen3_next, "linear_attn", serve_gdn, GDNAttnBackend),
    "kimi_linear": (kimi_linear, "self_attn", serve_kda, KDAAttnBackend),
    "nemotron_h": (nemotron_h, "mixer", serve_mamba2, Mamba2AttnBackend),
    "minimax": (minimax, "self_attn", serve_lightning, LightningAttentionBackend),
}


def cache_of(model, kind):
    """Of the layers that attend; what it has for the linear ones stays empty."""
    if kind != "minimax":
        return transformers.DynamicCache(config=model.config)
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


class Served:
    """One request of a model whose linear layers are ours."""

    def __init__(self, kind):
        make, attribute, serve, backend = KINDS[kind]
        torch.manual_seed(1)
        self.model = make().eval().float()
        for name, parameter in self.model.named_parameters():  # what is zeros or ones at first says too little
            if name.endswith(("dt_bias", "A_log", ".D")):
                parameter.data = 0.5 * torch.randn_like(parameter)
        torch.manual_seed(1)
        self.theirs = make().eval().float()
        self.theirs.load_state_dict(self.model.state_dict())
        modules = [getattr(layer, attribute, None) for layer in self.model.model.layers]
        modules = [m for m in modules if hasattr(m, "conv1d") or hasattr(m, "slope_rate")]
        self.layers = [layer_of(module, kind, place) for place, module in enumerate(modules)]
        first = self.layers[0]
        for module, layer in zip(modules, self.layers):

            def forward(self, hidden_states, *_, layer, **__):
                return serve(self, layer, hidden_states)

            module.forward = types.MethodType(partial(forward, layer=layer), module)
        conv = None if first.conv_weights is None else (first.conv_weights.shape[0], 3)
        state = (first.num_v_heads, first.head_v_dim, first.head_k_dim)
        pool = MambaPool(
            3, len(modules), conv, state, torch.float32, speculative_num_draft_tokens=4, num_k_heads=first.num_k_heads,
            gate_per_channel=kind == "kimi_linear",
        )  # fmt: skip
        self.rows = HybridReqToTokenPool(3, 256, pool)
        (self.row,) = self.rows.alloc()
        self.backend = backend(self.rows, LIMITS, range(len(modules)))
        self.cache, self.cached = cache_of(self.model, kind), 0

    @torch.no_grad()
    def step(self, tokens, mode):
        """Logits of each token."""
        count = len(tokens)
        ragged = mode is ForwardMode.EXTEND
        batch = AttentionBatch(
            forward_mode=mode,
            req_pool_indices=torch.tensor([self.row]),
            cache_seqlens=torch.tensor([self.cached + count], dtype=torch.int32),
            num_tokens=count,
            tokens_per_request=0 if ragged else count,
            extend_seq_lens=torch.tensor([count], dtype=torch.int32) if ragged else None,
        )
        self.backend.init_forward_metadata(batch)
        server = types.SimpleNamespace(forward_linear=self.backend.forward)
        positions = torch.arange(self.cached, self.cached + count)[None]
        with forward_context(batch, {}, server):
            out = self.model(torch.tensor([tokens]), past_key_values=self.cache, position_ids=positions, use_cache=True)
        self.cached += count
        return out.logits[0]

    def keep(self, drafts, accepted):
        """Of the drafts of the last step, the first `accepted`."""
        path = torch.arange(drafts, dtype=torch.int32)[None]
        self.backend.update_mamba_state_after_mtp_verify(path, torch.tensor([accepted], dtype=torch.int32))
        self.cached -= drafts - accepted
        for layer in self.cache.layers:
            if getattr(layer, "keys", None) is not None and layer.keys.numel():
                layer.keys, layer.values = layer.keys[:, :, : self.cached], layer.values[:, :, : self.cached]

    @torch.no_grad()
    def expected(self, tokens):
        """Of transformers' own model, from nothing, without a cache."""
        return self.theirs(torch.tensor([tokens]), use_cache=False).logits[0]


def tokens_of(length, seed):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunks", [[100], [64, 30, 6], [1, 1, 63, 35]])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_decoding_give_their_tokens(kind, chunks):
    served, prompt = Served(kind), tokens_of(sum(chunks), 5)
    expected, rows, begin = served.expected(prompt), [], 0
    for count in chunks:
        rows.append(served.step(prompt[begin : begin + count], ForwardMode.EXTEND))
        begin += count
    logits = torch.cat(rows)
    assert relative(logits, expected) < 1e-4 and torch.equal(logits.argmax(-1), expected.argmax(-1))
    for _ in range(6):
        prompt.append(int(logits[-1].argmax()))
        logits, expected = served.step(prompt[-1:], ForwardMode.DECODE), served.expected(prompt)
        assert relative(logits[-1], expected[-1]) < 1e-4 and int(logits[-1].argmax()) == int(expected[-1].argmax())


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_verified_and_rolled_back_to_their_tokens(kind):
    served, prompt = Served(kind), tokens_of(70, 6)
    served.step(prompt, ForwardMode.EXTEND)
    for step, accepted in enumerate([2, 4, 1, 3, 4, 1]):
        drafts = tokens_of(4, 10 + step)
        logits, expected = served.step(drafts, ForwardMode.TARGET_VERIFY), served.expected(prompt + drafts)
        assert relative(logits, expected[-4:]) < 1e-4
        assert torch.equal(logits.argmax(-1), expected[-4:].argmax(-1))
        served.keep(4, accepted)
        prompt += drafts[:accepted]
        if step == 3:
            prompt += tokens_of(1, 50)
            logits, expected = served.step(prompt[-1:], ForwardMode.DECODE), served.expected(prompt)
            assert relative(logits[-1], expected[-1]) < 1e-4
    prompt += tokens_of(20, 60)
    logits, expected = served.step(prompt[-20:], ForwardMode.EXTEND), served.expected(prompt)
    assert relative(logits, expected[-20:]) < 1e-4
