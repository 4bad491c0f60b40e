"""A model of attention layers: eager, and compiled without a graph break, gives the same bits through any backend."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading

import pytest
import torch
from attnops.backends import get_backend_class, registered_names
from attnops.layers import RadixAttention, collect_layers, forward_context, get_forward_context
from attnops.layers.forward_context import kv_order
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode
from steps import LIMITS, Model, make_step

HEADS, KV_HEADS, DIM = 4, 2, 32
WIDTH = HEADS * DIM
SPEC = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, page_size=16)
MODEL = Model("tiny", SPEC)
CAPABILITIES = {name: get_backend_class(name).capability for name in registered_names()}
BACKENDS = [  # those that run this model, prompts included, on the CPU
    name for name, c in CAPABILITIES.items() if "cpu" in c.devices and not c.reasons_against(SPEC, [ForwardMode.EXTEND])
]


class TinyModel(torch.nn.Module):
    """Two layers of attention and a projection: enough for a compiler to fuse around the attention."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.qkv = torch.nn.ParameterList(
            torch.randn(WIDTH + 2 * KV_HEADS * DIM, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(2)
        )
        self.attention = torch.nn.ModuleList(
            RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id) for layer_id in range(2)
        )

    def forward(self, x: torch.Tensor, batch: AttentionBatch | None = None) -> torch.Tensor:
        for weight, attention in zip(self.qkv, self.attention):
            q, k, v = (x @ weight.t()).split([WIDTH, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
            x = x + torch.tanh(attention(q, k, v, batch))
        return x


def prepared(name: str, mode: ForwardMode, prefix: list[int], new: list[int], seed: int = 0, **options):
    """A batch whose backend is ready, over a pool of zeros with two layers."""
    batch = make_step(MODEL, mode, prefix, new, seed=seed, **options).batch
    assert batch.token_to_kv_pool is not None
    for layer in range(2):
        for pages in batch.token_to_kv_pool.get_kv_buffer(layer):
            pages.normal_(generator=torch.Generator().manual_seed(layer))
    batch.attn_backend = get_backend_class(name)(SPEC, LIMITS)
    batch.attn_backend.init_forward_metadata(batch)
    return batch


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", BACKENDS)
def test_fullgraph_compile_equals_eager_bit_for_bit(name, compiler):
    model = TinyModel()
    x = inputs(20)
    lengths = ([0, 30], [13, 7])
    with torch.no_grad():
        expected = model(x, prepared(name, ForwardMode.EXTEND, *lengths))
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        batch = prepared(name, ForwardMode.EXTEND, *lengths)
        with forward_context(batch, collect_layers(model)):
            out = compiled(x)
    assert torch.equal(out, expected)


def test_no_graph_break_and_one_graph():
    model = TinyModel()
    batch = prepared("torch_native", ForwardMode.DECODE, [3, 40], [1, 1], uniform=True)
    with forward_context(batch, collect_layers(model)):
        report = torch._dynamo.explain(model)(inputs(2))
    assert report.graph_break_count == 0, report.break_reasons
    assert report.graph_count == 1


def test_no_recompile_across_batches_of_one_bucket():
    """Fifty decode steps of one size over new pools, tables, lengths and backends: one compilation."""
    counter = torch._dynamo.testing.CompileCounter()
    model = TinyModel()
    layers = collect_layers(model)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for seed in range(50):
            lengths = torch.randint(0, 150, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
            batch = prepared("intel_amx", ForwardMode.DECODE, lengths, [1] * 4, seed=seed, uniform=True)
            x = inputs(4, seed)
            with forward_context(batch, layers):
                out = compiled(x)
            if seed % 10 == 0:
                again = prepared("intel_amx", ForwardMode.DECODE, lengths, [1] * 4, seed=seed, uniform=True)
                assert torch.equal(out, model(x, again))
    assert counter.frame_count == 1


def test_one_more_compilation_serves_every_number_of_tokens():
    counter = torch._dynamo.testing.CompileCounter()
    model = TinyModel()
    compiled, layers = torch.compile(model, backend=counter, fullgraph=True), collect_layers(model)
    with torch.no_grad():
        for count in (4, 7, 9, 30, 12):
            x = inputs(count)
            with forward_context(prepared("intel_amx", ForwardMode.EXTEND, [3, 0], [count - 1, 1]), layers):
                out = compiled(x)
            assert torch.equal(out, model(x, prepared("intel_amx", ForwardMode.EXTEND, [3, 0], [count - 1, 1])))
    assert counter.frame_count == 2, "one for the first number, one for all"


def test_threads_have_steps_of_their_own():
    """Two models side by side, each in its own thread and context, do not see each other's step."""
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0)
    k = inputs(1, 1)[:, : KV_HEADS * DIM]
    barrier = threading.Barrier(2)

    def serve(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, alone = (prepared("intel_amx", ForwardMode.DECODE, [9 + seed], [1], seed, uniform=True) for _ in "ab")
        with forward_context(batch, {0: layer}):
            barrier.wait()
            out = layer(inputs(1, seed), k, k)
            barrier.wait()
        return out, layer(inputs(1, seed), k, k, alone)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for out, expected in pool.map(serve, (0, 1)):
            assert torch.equal(out, expected)


def test_a_compiled_model_outside_a_step_says_so():
    model = TinyModel()
    with forward_context(prepared("intel_amx", ForwardMode.DECODE, [3], [1], uniform=True), {}):
        pass
    with pytest.raises(RuntimeError, match="no step is running"):
        torch.compile(model, backend="eager", fullgraph=True)(inputs(1))


def test_rows_beyond_the_steps_tokens_are_zeros():
    """A bucket of 8 rows carries 5 tokens: the layer's op serves those and clears the rest, NaN or not."""
    batch = prepared("torch_native", ForwardMode.EXTEND, [0, 3], [4, 1])
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0)
    q, k, v = inputs(8), inputs(8, 1)[:, : KV_HEADS * DIM], inputs(8, 2)[:, : KV_HEADS * DIM]
    with forward_context(batch, {0: layer}):
        plain = layer(q[:5], k[:5], v[:5])
        for tensor in (q, k, v):
            tensor[5:] = float("nan")
        out = layer(q, k, v)
    assert torch.equal(out[:5], plain)
    assert torch.equal(out[5:], torch.zeros(3, WIDTH))


def test_an_attention_whose_output_nobody_uses_still_stores():
    """The op says that it writes the cache's byte, so functionalization does not drop it."""
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0)
    batch = prepared("torch_native", ForwardMode.DECODE, [3], [1], uniform=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def only_store(q, k, v):
        layer(q, k, v)
        return q + 1

    k = inputs(1, 1)[:, : KV_HEADS * DIM]
    with torch.no_grad(), forward_context(batch, {0: layer}):
        only_store(inputs(1), k, k)
    pages = batch.token_to_kv_pool.get_key_buffer(0)
    slot = batch.out_cache_loc.item()
    assert torch.equal(pages[slot // 16, slot % 16].flatten(), k[0])


def test_opcheck_of_the_layers_op():
    batch = prepared("torch_native", ForwardMode.DECODE, [3, 9], [1, 1], uniform=True)
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0)
    k = inputs(2, 1)[:, : KV_HEADS * DIM].contiguous()
    with forward_context(batch, {0: layer}):
        arguments = (inputs(2), k, k.clone(), torch.empty(2, WIDTH), kv_order(k.device), 0)
        torch.library.opcheck(torch.ops.attnops.unified_attention_with_output.default, arguments)


def test_the_layers_op_is_a_split_point_that_inductor_knows():
    op = torch.ops.attnops.unified_attention_with_output.default
    assert torch.Tag.cudagraph_unsafe in op.tags
    assert [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write] == ["output", "kv_order"]


def test_a_context_may_bring_its_own_backend():
    batch = prepared("torch_native", ForwardMode.DECODE, [3], [1], uniform=True)
    backend, batch.attn_backend = batch.attn_backend, None
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0)
    k = inputs(1, 1)[:, : KV_HEADS * DIM]
    with forward_context(batch, {0: layer}, backend) as context:
        assert context.backend is backend
        out = layer(inputs(1), k, k)
    batch.attn_backend = backend
    assert torch.equal(out, layer(inputs(1), k, k, batch))


def test_a_step_without_the_layer_or_without_a_backend_says_so():
    batch = prepared("torch_native", ForwardMode.DECODE, [3], [1], uniform=True)
    layer, k = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 5), inputs(1, 1)[:, : KV_HEADS * DIM]
    op = torch.ops.attnops.unified_attention_with_output
    with forward_context(batch, {0: layer}), pytest.raises(ValueError, match="no layer 5; give forward_context"):
        op(inputs(1), k, k, torch.empty(1, WIDTH), kv_order(k.device), 5)
    batch.attn_backend = None
    with forward_context(batch, {5: layer}), pytest.raises(ValueError, match="no attn_backend; set it"):
        layer(inputs(1), k, k)


def test_contexts_nest_and_end():
    with pytest.raises(RuntimeError, match="no step is running"):
        get_forward_context()
    outer = prepared("torch_native", ForwardMode.DECODE, [3], [1], uniform=True)
    inner = prepared("torch_native", ForwardMode.DECODE, [4], [1], uniform=True)
    with forward_context(outer, {}):
        with pytest.raises(KeyError), forward_context(inner, {}):
            raise KeyError
        assert get_forward_context().batch is outer


def test_two_layers_with_one_id_are_refused():
    model = torch.nn.ModuleList(RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 3) for _ in range(2))
    with pytest.raises(ValueError, match="layer_id 3 is used twice, again at 1"):
        collect_layers(model)


def test_arguments_that_nobody_honours_are_refused():
    with pytest.raises(ValueError, match="a layer with is_cross_attention has no window"):
        RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0, sliding_window_size=4, is_cross_attention=True)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        RadixAttention(5, DIM, 0.2, 2, 0)
    batch = prepared("torch_native", ForwardMode.DECODE, [3], [1], uniform=True)
    batch.attn_backend = None
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0)
    with pytest.raises(ValueError, match="no attn_backend"):
        layer(inputs(1), None, None, batch)


def test_sinks_of_a_model_stay_its_parameter():
    sinks = torch.nn.Parameter(torch.zeros(HEADS))
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0, sinks=sinks)
    assert dict(layer.named_parameters())["sinks"] is sinks
    assert "sinks" not in RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0, sinks=torch.zeros(HEADS)).state_dict()


def register_on_layer(kind, layer, hook):
    return getattr(layer, f"register_{kind}_hook")(hook)


def register_on_all_modules(kind, layer, hook):
    return getattr(torch.nn.modules.module, f"register_module_{kind}_hook")(hook)


@pytest.mark.parametrize("register", [register_on_layer, register_on_all_modules])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_are_called_as_those_of_any_module(kind, register):
    """RadixAttention has a call of its own, which is shorter while there are no hooks."""
    batch = prepared("torch_native", ForwardMode.DECODE, [5], [1])
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    q = torch.randn(1, WIDTH, requires_grad=True)
    k, v = torch.randn(2, 1, KV_HEADS * DIM).unbind()
    calls = []

    def called(module, *rest):
        if module is layer:
            calls.append(kind)

    handle = register(kind, layer, called)
    try:
        out = layer(q, k, v, batch)
        if "backward" in kind:
            out.sum().backward()
    finally:
        handle.remove()
    assert calls == [kind]
    layer(q, k, v, batch)
    assert calls == [kind]


def test_a_layer_compiled_in_place_runs_compiled():
    batch = prepared("torch_native", ForwardMode.DECODE, [5], [1])
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    q, k, v = torch.randn(1, WIDTH), *torch.randn(2, 1, KV_HEADS * DIM).unbind()
    graphs = []

    def compiler(graph, example_inputs):
        graphs.append(graph)
        return graph

    expected = layer(q, k, v, batch)
    layer.compile(backend=compiler)
    with torch.no_grad(), forward_context(batch, {0: layer}):
        assert torch.equal(layer(q, k, v), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_of_another_width_are_refused_by_name(name, mode):
    batch = prepared(name, mode, [5], [1])
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    rows = {"q": torch.randn(1, WIDTH), "k": torch.randn(1, KV_HEADS * DIM), "v": torch.randn(1, KV_HEADS * DIM)}
    for wrong, tensor in rows.items():
        expected = rf"{wrong}.*must have shape \[num_tokens, {tensor.shape[1]}\].*got \[1, {tensor.shape[1] - 1}\]"
        with pytest.raises((ValueError, RuntimeError), match=expected):
            layer(*{**rows, wrong: tensor[:, :-1]}.values(), batch)


def test_names_of_sglang_follow_the_layers_own():
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0, v_head_dim=16)
    assert (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num) == (HEADS, KV_HEADS, KV_HEADS)
    assert (layer.qk_head_dim, layer.v_head_dim, layer.is_cross_attention) == (DIM, 16, False)
    with pytest.raises(AttributeError):
        layer.is_cross_attention = True
    layer.num_heads = 8
    assert layer.tp_q_head_num == 8


def test_scales_as_floats_are_those_of_the_layers_version():
    layer = RadixAttention(HEADS, DIM, 0.2, KV_HEADS, 0, k_scale=torch.tensor([0.5]))
    assert layer.k_scale_float == 0.5 and layer.v_scale_float is None
    assert layer._scale_floats["k_scale"][0] == layer.version, "a read is no change"
    layer.k_scale = torch.tensor([0.25])
    assert layer.k_scale_float == 0.25
    layer.v_scale = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match=r"v_scale of layer 0 has 2 values"):
        _ = layer.v_scale_float


def test_a_tracer_sees_the_layer_as_a_module():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, RadixAttention)

    graph = Tracer().trace(TinyModel(), concrete_args={"batch": None})
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["attention.0", "attention.1"]
    assert "__call__" not in RadixAttention.__dict__


def test_graphs_are_reachable_from_the_package():
    code = "import attnops, sys; assert 'attnops.graphs' not in sys.modules; print(attnops.graphs.GraphRunner.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "GraphRunner"
