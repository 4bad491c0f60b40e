"""transformers' own `generate`, `generate_batch` and forward on attnops: as eager attention has it, in float32."""

from __future__ import annotations

import inspect
import math

import pytest
import tiny_models
import torch
from attnops.plugins import unsupported

pytestmark = pytest.mark.skipif(bool(unsupported("transformers")), reason=unsupported("transformers") or "-")

if not unsupported("transformers"):
    import transformers
    from attnops.plugins import transformers as plugin

    plugin.register()
    # Up to 5.23 a model calls its cache `past_key_values`.
    NEW_NAME = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    CACHE = "cache" if NEW_NAME else "past_key_values"

CACHES = ["dynamic", "static"]
OP = torch.ops.attnops.padded_attention.default if not unsupported("transformers") else None


class CallCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls of the plug-in's op."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is OP
        return func(*args, **(kwargs or {}))


def generated(model, ids, mask, cache, **options):
    torch.manual_seed(0)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=14,
        min_new_tokens=14,
        do_sample=False,
        cache_implementation=None if cache == "dynamic" else cache,
        **options,
    )[:, ids.shape[1] :]


def padded_batch():
    ids = tiny_models.prompts(4, 13)
    mask = torch.ones_like(ids)
    for request, padding in enumerate([0, 5, 12, 1]):
        mask[request, :padding] = 0
        ids[request, :padding] = 0
    return ids, mask


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_generate_gives_the_tokens_of_eager(kind, cache, padded):
    model = tiny_models.model(kind)
    ids, mask = padded_batch()
    if not padded:
        ids, mask = tiny_models.prompts(3, 13), torch.ones(3, 13, dtype=torch.int64)
    model.set_attn_implementation("eager")
    expected = generated(model, ids, mask, cache, disable_compile=True)
    assert len(expected.unique()) > 8, "a model that repeats itself shows nothing"
    model.set_attn_implementation("attnops")
    with CallCounter() as counter:
        tokens = generated(model, ids, mask, cache, disable_compile=True)
    assert counter.calls == 14 * model.config.num_hidden_layers
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt_oss"])
def test_a_compiled_decode_step_is_one_graph(kind):
    """With a static cache `generate` compiles the decode step, here without leave to break it."""
    model = tiny_models.model(kind)
    ids, mask = padded_batch()
    model.set_attn_implementation("eager")
    expected = generated(model, ids, mask, "static", disable_compile=True)
    model.set_attn_implementation("attnops")
    torch._dynamo.reset()
    compiled = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    tokens = generated(model, ids, mask, "static", compile_config=compiled)
    assert sum(torch._dynamo.utils.counters["stats"].values()), "nothing was compiled"
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_compiled_forward_has_no_break(kind, masked):
    model = tiny_models.model(kind)
    ids, mask = padded_batch()
    mask = mask if masked else None
    expected = logits(model, "eager", ids, attention_mask=mask)
    torch._dynamo.reset()
    model.set_attn_implementation("attnops")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(ids, attention_mask=mask, use_cache=False).logits
    rows = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(got[rows], expected[rows], rtol=1e-3, atol=1e-3)


def logits(model, implementation, ids, **options):
    model.set_attn_implementation(implementation)
    return model(ids, **options).logits


@pytest.mark.parametrize("kind", tiny_models.KINDS)
@pytest.mark.parametrize("holes", [False, True], ids=["right-padded", "holes"])
def test_any_padding_is_exact(kind, holes):
    model = tiny_models.model(kind)
    ids, mask = tiny_models.prompts(3, 17), torch.ones(3, 17, dtype=torch.int64)
    mask[0, 12:] = 0
    if holes:
        mask[1, 3:9] = 0
        mask[2, ::3] = 0
    expected = logits(model, "eager", ids, attention_mask=mask)
    got = logits(model, "attnops", ids, attention_mask=mask)
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("holes", [False, True], ids=["left-padded", "holes"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_conversation_goes_on_after_its_cache(kind, cache, holes):
    """A prompt in pieces of 9, 4 and 1 tokens; windows of 6 and 7 fill up in between."""
    model, config = tiny_models.model(kind), tiny_models.config(kind)
    ids, mask = tiny_models.prompts(3, 14), torch.ones(3, 14, dtype=torch.int64)
    mask[1, :3] = 0
    mask[2, :8] = 0
    if holes:
        mask[0, 5:7] = 0
        mask[2, 10] = 0
    results = {}
    for implementation in ("eager", "attnops"):
        model.set_attn_implementation(implementation)
        past = (
            transformers.DynamicCache(config=config)
            if cache == "dynamic"
            else transformers.StaticCache(config=config, max_cache_len=32)
        )
        pieces, start = [], 0
        for size in (9, 4, 1):
            now = slice(start, start + size)
            start += size
            out = model(ids[:, now], attention_mask=mask[:, :start], use_cache=True, **{CACHE: past})
            pieces.append(out.logits)
        results[implementation] = torch.cat(pieces, dim=1)
    torch.testing.assert_close(results["attnops"][mask.bool()], results["eager"][mask.bool()], rtol=1e-3, atol=1e-3)


def test_packed_sequences_and_a_users_own_mask_are_exact():
    model = tiny_models.model("llama")
    ids = tiny_models.prompts(1, 15)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    expected = logits(model, "eager", ids, position_ids=positions)
    torch.testing.assert_close(logits(model, "attnops", ids, position_ids=positions), expected, rtol=1e-3, atol=1e-3)

    own = torch.rand(1, 1, 15, 15) < 0.6
    own |= torch.eye(15, dtype=torch.bool)
    bias = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    expected = logits(model, "eager", ids, attention_mask=bias)
    torch.testing.assert_close(logits(model, "attnops", ids, attention_mask=own), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(NotImplementedError, match=r"a mask of torch\.float32"):
        logits(model, "attnops", ids, attention_mask=bias)


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_sees_both_sides(padded):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64
    )
    model = transformers.BertModel(config).eval().requires_grad_(False)
    ids, mask = torch.randint(3, 99, (3, 18)), torch.ones(3, 18, dtype=torch.int64)
    if padded:
        mask[1, 11:] = 0
        mask[2, :4] = 0
    states = []
    for implementation in ("eager", "attnops"):
        model.set_attn_implementation(implementation)
        states.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-4)


# transformers 5.24 itself does not serve MLA in continuous batching: its paged cache has another head dim.
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt_oss"])
def test_continuous_batching_gives_the_tokens_of_generate(kind, monkeypatch):
    from attnops.plugins.transformers import continuous

    model = tiny_models.model(kind)
    inputs = [tiny_models.prompts(1, n, seed=n)[0].tolist() for n in (3, 17, 9, 30)]
    model.set_attn_implementation("eager")
    expected = []
    for ids in inputs:
        row = torch.tensor([ids])
        expected.append(generated(model, row, torch.ones_like(row), "dynamic")[0].tolist())
    calls = []
    inner = continuous.flash_attn_interface.flash_attn_varlen_func
    monkeypatch.setattr(
        continuous.flash_attn_interface,
        "flash_attn_varlen_func",
        lambda *args, **options: calls.append(1) or inner(*args, **options),
    )
    model.set_attn_implementation(plugin.CONTINUOUS_NAME)
    config = transformers.GenerationConfig(max_new_tokens=14, min_new_tokens=14, do_sample=False, eos_token_id=-1)
    results = model.generate_batch(inputs, generation_config=config, progress_bar=False)
    got = [result.generated_tokens for result in results.values()]
    assert calls and sorted(got) == sorted(expected)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_the_flash_name_serves_generate_too(kind):
    model = tiny_models.model(kind)
    ids, mask = padded_batch()
    model.set_attn_implementation("eager")
    expected = generated(model, ids, mask, "dynamic")
    model.set_attn_implementation(plugin.CONTINUOUS_NAME)
    assert torch.equal(generated(model, ids, mask, "dynamic"), expected)


def test_what_is_not_served_is_refused_by_name():
    model = tiny_models.model("llama").requires_grad_(True)
    model.set_attn_implementation("attnops")
    ids = tiny_models.prompts(1, 4)
    with pytest.raises(NotImplementedError, match=r"gradients .*eager"):
        model(ids)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"dropout=0\.1"):
        model(ids)


@pytest.mark.parametrize("name", ["cache", "read_index", "block_table"])
def test_a_paged_cache_is_refused_by_every_name_that_it_had(name):
    from attnops.plugins.transformers import masks

    q, module = torch.zeros(1, 2, 3, 64), torch.nn.Module()
    assert masks.attention_forward(module, q, q, q, None, **{name: None})[0].shape == (1, 3, 2, 64)
    with pytest.raises(NotImplementedError, match=r"a paged cache .*attnops_flash_attention_3"):
        masks.attention_forward(module, q, q, q, None, **{name: [torch.arange(3)]})


def test_registering_again_changes_nothing():
    from transformers import modeling_flash_attention_utils as utils

    before = utils._lazy_imports
    assert plugin.register() and plugin.register()
    assert utils._lazy_imports is before
    assert "attnops" in transformers.AttentionInterface().valid_keys()


LAYOUTS = {
    "heads first": lambda t: t,
    "tokens first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a longer cache": lambda t: torch.cat([t, t.new_full(t.shape, math.nan)], dim=2)[:, :, : t.shape[2]],
    "v alone is apart": None,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (96, 64)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 5, 33])
def test_the_op_equals_sdpa_on_any_layout(layout, dims, seqlen_q):
    requests, num_keys = 3, 37
    q = torch.randn(requests, 6, seqlen_q, dims[0])
    k, v = torch.randn(requests, 2, num_keys, dims[0]), torch.randn(requests, 2, num_keys, dims[1])
    mask = torch.rand(requests, 1, seqlen_q, num_keys) < 0.5
    mask[0, 0, 0] = False  # a query without a key
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).nan_to_num(0)
    arrange = LAYOUTS[layout]
    if arrange is None:
        v = LAYOUTS["tokens first"](v)
    else:
        k, v = arrange(k), arrange(v)
    from attnops.plugins.transformers.masks import _listed

    keys = _listed(mask)
    out = plugin.padded_attention(q, k, v, keys)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
    torch.library.opcheck(OP, (torch.empty_like(out), q, k, v, keys, dims[0] ** -0.5, True, -1, 0.0, torch.randn(6)))
    with pytest.raises(ValueError, match="keys must be"):
        plugin.padded_attention(q, k, v, keys[..., :-1])


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_layers_of_a_step_share_a_plan_and_other_steps_have_their_own(inference, monkeypatch):
    """Of a dynamic cache by how many keys it has, of a static one by the mask function's tensor, and its changes."""
    from attnops.plugins.transformers import attention

    plans = []
    make = attention.ops.xqa_decode_plan
    monkeypatch.setattr(attention.ops, "xqa_decode_plan", lambda *given: plans.append(given) or make(*given))
    monkeypatch.setattr(attention._kinds, "kept", {})

    def layer(num_keys: int, keys=None, window=-1) -> None:
        q, k, v = torch.randn(2, 4, 1, 32), torch.randn(2, 2, num_keys, 32), torch.randn(2, 2, num_keys, 32)
        seen = torch.arange(num_keys).expand(2, 1, 1, -1) < (num_keys if keys is None else keys)
        if window >= 0:
            seen = seen & (torch.arange(num_keys) >= (num_keys if keys is None else keys) - 1 - window)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        out = plugin.padded_attention(q, k, v, keys, window_left=window)
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)

    with torch.inference_mode() if inference else torch.no_grad():
        for num_keys, window in ((9, -1), (9, -1), (10, -1), (10, 3), (10, -1), (10, 3)):
            layer(num_keys, window=window)
        assert len(plans) == 3, "9 keys; 10 keys, with a window and without"
        keys = torch.tensor([5, 7], dtype=torch.int32).view(2, 1, 1, 1)
        for _ in range(3):
            layer(12, keys)
        assert len(plans) == (6 if inference else 4), "tensors of inference mode do not say that they were changed"
        keys.add_(2)
        layer(12, keys)
        layer(12, keys.clone())
        assert len(plans) == (8 if inference else 6)
