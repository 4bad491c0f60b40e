"""Cross attention: encoders' tokens in front of a request's own, over any backend, in every mode, and in graphs."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import reference
from attnops.backends import EncoderDecoderBackend, HybridAttnBackend, get_backend_class, select_backend
from attnops.graphs import CudaGraphs, GraphRunner
from attnops.graphs.static_inputs import StaticInput
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape

NAMES = ["torch_native", "intel_amx", "fa3", "flex_attention", "triton"]
REQUESTS, OWN, ENCODER = 5, 96, 70
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 64, 0.15
GPU = pytest.mark.gpu


def maker(name):
    """A backend's class; "a+b": a hybrid of a for prefill and b for decode."""
    if "+" not in name:
        return get_backend_class(name)
    prefill, decode = (get_backend_class(one) for one in name.split("+"))
    return lambda spec, limits, device: HybridAttnBackend(
        prefill(spec, limits, device), decode(spec, limits, device), "decode"
    )


class Model:
    """Two layers, one of them cross attention, over pages full of NaN; keys and values are kept to compare with."""

    def __init__(self, name, page_size, seed=0, *, device="cpu", dtype=torch.float32, **options):
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.page_size, self.device, self.dtype = page_size, device, dtype
        context = (-(-ENCODER // page_size) + -(-OWN // page_size)) * page_size
        self.pool = MHATokenToKVPool(REQUESTS * context, page_size, dtype, KV_HEADS, DIM, 2, device=device)
        for pages in self.pool.all_buffers()[0]:
            pages.fill_(float("nan"))
        order = torch.randperm(REQUESTS * context // page_size, generator=self.generator).view(REQUESTS, -1, 1)
        self.table = (order * page_size + torch.arange(page_size)).flatten(1).int().to(device)
        heads = (HEADS, DIM, SCALE, KV_HEADS)
        self.own_layer = RadixAttention(*heads, 0)
        self.cross_layer = RadixAttention(*heads, 1, is_cross_attention=True)
        spec = AttentionSpec(
            num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, page_size=page_size, **options
        )
        limits = Limits(max_batch_size=REQUESTS, max_seqlen=OWN, max_num_tokens=300, max_tokens_per_request=3)
        self.backend = EncoderDecoderBackend(maker(name), spec, limits, device, max_encoder_tokens=ENCODER)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def cells(self, row, encoder, begin, end):
        """Slots of a request's own tokens."""
        first = -(-encoder // self.page_size) * self.page_size
        return self.table[row, first + begin : first + end].long()

    def start(self, rows, encoders, prefixes):
        """Requests with own tokens in the cache; what a later step must find."""
        self.rows, self.encoders = rows, encoders
        self.own = [self.draw(2, prefix, KV_HEADS, DIM) for prefix in prefixes]
        self.encoded = [self.draw(2, encoder, KV_HEADS, DIM) for encoder in encoders]
        for row, encoder, (k, v) in zip(rows, encoders, self.own):
            self.pool.set_kv_buffer(self.own_layer, self.cells(row, encoder, 0, len(k)), k, v)

    def encoder_slots(self):
        return torch.cat([self.table[row, :encoder].long() for row, encoder in zip(self.rows, self.encoders)])

    def batch(self, mode, new, *, stores):
        lengths = [len(k) + count for (k, _), count in zip(self.own, new)]
        slots = [
            self.cells(row, encoder, length - count, length)
            for row, encoder, length, count in zip(self.rows, self.encoders, lengths, new)
        ]
        uniform = mode is not ForwardMode.EXTEND
        tensors = {"dtype": torch.int32, "device": self.device}
        return AttentionBatch(
            forward_mode=mode,
            req_pool_indices=torch.tensor(self.rows, device=self.device),
            cache_seqlens=torch.tensor(lengths, **tensors),
            num_tokens=sum(new),
            req_to_token=self.table,
            out_cache_loc=torch.cat(slots),
            tokens_per_request=new[0] if uniform else 0,
            extend_seq_lens=None if uniform else torch.tensor(new, **tensors),
            positions=torch.zeros(sum(new), dtype=torch.int64, device=self.device),
            encoder_lens=torch.tensor(self.encoders, **tensors),
            cache_seqlens_cpu=torch.tensor(lengths, dtype=torch.int32),
            extend_seq_lens_cpu=None if uniform else torch.tensor(new, dtype=torch.int32),
            encoder_lens_cpu=torch.tensor(self.encoders, dtype=torch.int32),
            encoder_out_cache_loc=self.encoder_slots() if stores else None,
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )

    def inputs(self, new):
        """q of both layers, and k and v of the first."""
        return self.draw(sum(new), 2, HEADS, DIM), *self.draw(2, sum(new), KV_HEADS, DIM)

    def layers(self, batch, q, k, v, encoded=None):
        own = self.own_layer(q[:, 0].flatten(1), k, v, batch)
        e = (None, None) if encoded is None else encoded
        return own, self.cross_layer(q[:, 1].flatten(1), *e, batch)

    def step(self, mode, new, *, stores=False):
        """Runs a step eagerly and compares it."""
        batch, (q, k, v) = self.batch(mode, new, stores=stores), self.inputs(new)
        encoded = torch.cat(self.encoded, 1) if stores else None
        self.backend.init_forward_metadata(batch)
        outs = self.layers(batch, q, k, v, encoded)
        self.backend.raise_on_fault()
        self.check(outs, new, q, k, v)
        self.keep(new, k, v)

    def keep(self, new, k, v):
        parts = zip(k.split(new), v.split(new))
        self.own = [torch.cat([old, torch.stack(part)], 1) for old, part in zip(self.own, parts)]

    def check(self, outs, new, q, k, v):
        own, cross = (out.unflatten(-1, (HEADS, DIM)) for out in outs)
        expected_own, expected_cross = [], []
        for b, (queries, new_k, new_v) in enumerate(zip(q.split(new), k.split(new), v.split(new))):
            keys, values = (torch.cat([old, x]) for old, x in zip(self.own[b], (new_k, new_v)))
            queries = queries.cpu().double()
            expected_own.append(
                reference.attention(queries[:, 0], keys.cpu().double(), values.cpu().double(), softmax_scale=SCALE)[0]
            )
            e = self.encoded[b].cpu().double()
            expected_cross.append(reference.attention(queries[:, 1], *e, softmax_scale=SCALE, causal=False)[0])
            if not self.encoders[b]:
                assert not expected_cross[-1].any()
        bound = MAX_RELATIVE_ERROR[self.dtype]
        assert relative_error(own.cpu(), torch.cat(expected_own)) <= bound
        assert relative_error(cross.cpu(), torch.cat(expected_cross)) <= bound


def serve(model):
    """Prompts, one of whom has no encoder; decodes, a verify step, and prompts that go on."""
    model.start([4, 1, 2, 0], [ENCODER, 0, 1, 33], [0, 0, 7, 20])
    model.step(ForwardMode.EXTEND, [3, 40, 1, 17], stores=True)
    for _ in range(3):
        model.step(ForwardMode.DECODE, [1] * 4)
    model.step(ForwardMode.TARGET_VERIFY, [3] * 4)
    model.step(ForwardMode.EXTEND, [5, 1, 30, 2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prompts_decodes_and_verifies(name, page_size, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    serve(Model(name, page_size, seed=page_size))


@pytest.mark.parametrize("options", [{"sliding_window_size": 9}, {"logit_cap": 4.0}, {"deterministic": True}], ids=str)
def test_rules_of_the_own_tokens_are_not_the_encoders(options):
    """Windows belong to the decoder's layers; this model's cross attention has none."""
    model = Model("intel_amx", 16, **options)
    if "logit_cap" not in options:
        serve(model)
    assert model.backend.cross.spec.sliding_window_size == -1
    assert model.backend.cross.spec.deterministic == model.backend.spec.deterministic


def check_graphs(name, page_size, recorder, turns, **options):
    """Replays with other requests, lengths and encoders have the bits of eager steps."""
    model = Model(name, page_size, **options)

    def forward(input_ids, positions, batch, *, q, k, v):
        del input_ids, positions
        return torch.cat(model.layers(batch, q, k, v), -1)

    rows = {"q": (2, HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)}
    runner = GraphRunner(
        forward,
        model.backend,
        model.table,
        model.pool,
        sizes=range(1, REQUESTS + 1),
        inputs={key: StaticInput(shape, dtype=model.dtype) for key, shape in rows.items()},
        layers={0: model.own_layer, 1: model.cross_layer},
        recorder=recorder,
    )
    runner.capture(progress=False)
    for turn in range(turns):
        count = model.rng.randint(1, REQUESTS)
        model.start(
            model.rng.sample(range(REQUESTS), count),
            [model.rng.choice([0, 1, page_size, model.rng.randint(1, ENCODER)]) for _ in range(count)],
            [model.rng.randint(0, OWN - 40) for _ in range(count)],
        )
        model.step(ForwardMode.EXTEND, [2] * count, stores=True)
        new = [1] * count
        batch, (q, k, v) = model.batch(ForwardMode.DECODE, new, stores=False), model.inputs(new)
        got = runner.replay(torch.zeros(count, dtype=torch.int64, device=model.device), batch, q=q, k=k, v=v).clone()
        model.check(got.chunk(2, -1), new, q, k, v)
        model.backend.init_forward_metadata(batch)
        assert torch.equal(got, torch.cat(model.layers(batch, q, k, v), -1)), f"turn {turn}"


@pytest.mark.parametrize("name", ["torch_native", "intel_amx", "fa3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_of_decodes(name, page_size):
    check_graphs(name, page_size, GraphTape, 20)


@pytest.mark.usefixtures("flashinfer_stand_in")
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_backend_that_plans_on_the_host(page_size, monkeypatch):
    """flashinfer: one wrapper for a request's own tokens, one for its encoder's, eager and in graphs."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_SIZE", "4096")
    model = Model("flashinfer", page_size, seed=page_size, dtype=torch.bfloat16)
    serve(model)
    assert model.backend.needs_cpu_seq_lens
    for side in (model.backend.own, model.backend.cross):
        assert [key[0] for key in side.wrappers._eager].count("decode") == 1
    check_graphs("flashinfer", page_size, GraphTape, 10, dtype=torch.bfloat16)


@GPU
@pytest.mark.parametrize("name", ["fa3", "fa3+trtllm_mha", "torch_native"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(name, page_size, dtype):
    serve(Model(name, page_size, seed=page_size, device="cuda", dtype=dtype))
    check_graphs(name, page_size, CudaGraphs("cuda"), 30, device="cuda", dtype=dtype)


def test_errors_name_what_is_wrong():
    model = Model("intel_amx", 16)
    model.start([0], [5], [3])
    batch = model.batch(ForwardMode.DECODE, [1], stores=False)
    q, k, v = model.inputs([1])
    with pytest.raises(RuntimeError, match="must run before the rest of an encoder-decoder step"):
        model.layers(batch, q, k, v)
    model.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="k of cross attention needs v, and encoder_out_cache_loc"):
        model.layers(batch, q, k, v, model.encoded[0])
    batch.encoder_lens = None
    with pytest.raises(ValueError, match="a step of an encoder-decoder model needs encoder_lens"):
        model.backend.init_forward_metadata(batch)
    batch.attn_backend = model.backend.own
    with pytest.raises(NotImplementedError, match="needs an EncoderDecoderBackend, the step has intel_amx"):
        model.cross_layer(q[:, 1].flatten(1), None, None, batch)
    limits = Limits(max_batch_size=2, max_seqlen=64)
    with pytest.raises(ValueError, match="max_encoder_tokens must be 1 or more, got 0"):
        EncoderDecoderBackend(maker("intel_amx"), model.backend.spec, limits, max_encoder_tokens=0)
    with pytest.raises(NotImplementedError, match="cross attention needs K and V"):
        EncoderDecoderBackend(select_backend, AttentionSpec.mla(4), limits, max_encoder_tokens=9)
