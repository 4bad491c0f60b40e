"""Double sparsity beside float64: labels, selection, a dense rest, in every mode and in graphs."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from attnops.backends import DoubleSparseAttnBackend, get_backend_class
from attnops.backends.double_sparsity import load_heavy_channels
from attnops.graphs import CudaGraphs
from attnops.layers import RadixAttention
from attnops.pools import DoubleSparseTokenToKVPool, MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, AttentionType, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape

HEADS, KV_HEADS, DIM, SCALE, CONTEXT, ROWS = 6, 2, 64, 0.15, 320, 5
FP8 = torch.float8_e4m3fn
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def make(spec, limits, device="cpu", **options):
    channels = [torch.stack([torch.randperm(spec.head_dim) for _ in range(spec.num_kv_heads)]) for _ in range(2)]
    return DoubleSparseAttnBackend(spec, limits, device, sorted_channels=channels, **options)


class Model:
    def __init__(
        self, page_size=16, *, channels=8, tokens=24, threshold=64, seed=0, device="cpu", has_sinks=False, **dtypes
    ):
        self.rng, self.generator, self.device = random.Random(seed), torch.Generator().manual_seed(seed), device
        self.dtype, self.tokens, self.threshold = dtypes.get("dtype", torch.float32), tokens, threshold
        kv_dtype = dtypes.get("kv_dtype", self.dtype)
        self.pool = DoubleSparseTokenToKVPool(
            ROWS * CONTEXT, page_size, kv_dtype, KV_HEADS, DIM, 2, device, heavy_channel_num=channels
        )
        for pages in self.pool.all_buffers()[0]:
            pages.view(torch.uint8).fill_(0xFF)  # NaN of every dtype
        order = torch.randperm(ROWS * CONTEXT // page_size, generator=self.generator).view(ROWS, -1, 1)
        self.table = (order * page_size + torch.arange(page_size)).flatten(1).int().to(device)
        spec = AttentionSpec(
            num_q_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            has_sinks=has_sinks,
        )
        limits = Limits(max_batch_size=ROWS, max_seqlen=CONTEXT, max_num_tokens=600, max_tokens_per_request=3)
        options = {"ds_heavy_channel_num": channels, "ds_heavy_token_num": tokens}
        self.backend = make(spec, limits, device, ds_sparse_decode_threshold=threshold, **options)
        self.sinks = torch.linspace(-1, 4, HEADS) if has_sinks else torch.full((HEADS,), -math.inf)
        sinks = self.sinks.to(device) if has_sinks else None
        self.layers = [RadixAttention(HEADS, DIM, SCALE, KV_HEADS, index, sinks=sinks) for index in range(2)]
        self.past = {}  # (layer, row): k and v of all tokens

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def step(self, mode, rows, new):
        """A batch, and what each layer brings."""
        seqlens, slots = [], []
        for row, count in zip(rows, new):
            prefix = len(self.past.get((0, row), ((),))[0])
            seqlens.append(prefix + count)
            slots.append(self.table[row, prefix : prefix + count].long())
        inputs = []
        for layer in range(2):
            q, k, v = (self.draw(sum(new), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            inputs.append((q, k, v))
            ends = torch.tensor(new).cumsum(0).tolist()
            for row, count, end in zip(rows, new, ends):
                own = slice(end - count, end)
                kept = self.past.get((layer, row))
                pair = tuple(x[own].to(self.pool.dtype).cpu().double() for x in (k, v))
                self.past[layer, row] = pair if kept is None else tuple(map(torch.cat, zip(kept, pair)))
        uniform = mode is not ForwardMode.EXTEND
        tensors = {"dtype": torch.int32, "device": self.device}
        batch = AttentionBatch(
            forward_mode=mode,
            req_pool_indices=torch.tensor(rows, device=self.device),
            cache_seqlens=torch.tensor(seqlens, **tensors),
            num_tokens=sum(new),
            req_to_token=self.table,
            out_cache_loc=torch.cat(slots),
            tokens_per_request=new[0] if uniform else 0,
            extend_seq_lens=None if uniform else torch.tensor(new, **tensors),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )
        return batch, inputs

    def expected(self, layer, q, rows, new, selects):
        q, done, outs = q.cpu().double(), 0, []
        channels = self.backend._channels[layer].cpu()
        for row, count in zip(rows, new):
            k, v = self.past[layer, row]
            for i in range(count):
                last = len(k) - count + i + 1
                out = torch.zeros(HEADS, DIM, dtype=torch.float64)
                for h in range(KV_HEADS):
                    own = slice(h * HEADS // KV_HEADS, (h + 1) * HEADS // KV_HEADS)
                    mine, keys = q[done + i, own], torch.arange(last)
                    if selects and last >= self.threshold and last > self.tokens:
                        label = k[:last, h][:, channels[h]]
                        keys = (mine[:, channels[h]] @ label.T).amax(0).topk(self.tokens).indices
                    scores = torch.cat([SCALE * mine @ k[keys, h].T, self.sinks[own, None].double()], 1)
                    out[own] = scores.softmax(-1)[:, :-1] @ v[keys, h]
                outs.append(out)
            done += count
        return torch.stack(outs)

    def run(self, mode, rows, new, bound=None):
        batch, inputs = self.step(mode, rows, new)
        self.backend.init_forward_metadata(batch)
        for layer, (q, k, v) in zip(self.layers, inputs):
            out = layer(q.flatten(1), k.flatten(1), v.flatten(1), batch).unflatten(-1, (HEADS, DIM))
            answer = self.expected(layer.layer_id, q, rows, new, mode is ForwardMode.DECODE)
            assert relative_error(out.cpu(), answer) <= (bound or MAX_RELATIVE_ERROR[self.dtype])
        self.backend.raise_on_fault()


def serve(model, bound=None):
    model.run(ForwardMode.EXTEND, [0, 1, 2, 3], [200, 62, 20, 129], bound)
    for rows in ([0, 1, 2, 3], [3, 0], [1, 2, 0]):
        model.run(ForwardMode.DECODE, rows, [1] * len(rows), bound)
    model.run(ForwardMode.TARGET_VERIFY, [0, 2], [3, 3], bound)
    model.run(ForwardMode.EXTEND, [4, 1], [90, 5], bound)
    model.run(ForwardMode.DECODE, [4, 2, 1, 0, 3], [1] * 5, bound)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_mode(page_size, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("ATTNOPS_CHECK", "1")
    serve(Model(page_size, device=device))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_sinks(device):
    """In dense steps, and in both calls of a step that selects."""
    serve(Model(device=device, has_sinks=True))
    options = {"channels": DIM, "tokens": 300, "dtype": torch.bfloat16}
    serve(Model(device=device, has_sinks=True, **options), 2 * MAX_RELATIVE_ERROR[torch.bfloat16])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": 1000}, {"tokens": 1, "channels": 2}])
def test_limits_of_selection(options, device):
    serve(Model(device=device, **options))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_scores_are_held_in_parts(device, monkeypatch):
    monkeypatch.setattr("attnops.backends.double_sparsity.SCORE_BYTES", 4 * CONTEXT * KV_HEADS * 2)
    model = Model(device=device)
    assert model.backend._selection._requests == 2
    serve(model)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_16_bit_and_fp8_caches(device):
    """All channels are heavy and all tokens chosen: rounding decides nothing."""
    options = {"channels": DIM, "tokens": 300, "device": device}
    serve(Model(dtype=torch.bfloat16, **options), 2 * MAX_RELATIVE_ERROR[torch.bfloat16])
    serve(Model(dtype=torch.bfloat16, kv_dtype=FP8, **options), 2 * MAX_RELATIVE_ERROR[torch.bfloat16])


def check_replays(model, recorder):
    """Decode steps of other lengths through one graph: bits of an eager step."""
    model.run(ForwardMode.EXTEND, [0, 1, 2], [200, 20, 63])
    batch, inputs = model.step(ForwardMode.DECODE, [0, 1, 2], [1] * 3)
    static = [[x.flatten(1).clone() for x in parts] for parts in inputs]
    model.backend.init_cuda_graph_state(3, 3)
    outs = [None, None]

    def step():
        model.backend.init_forward_metadata_in_graph(batch)
        for layer, parts in zip(model.layers, static):
            outs[layer.layer_id] = layer(*parts, batch)

    model.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    if recorder is None:
        tape = GraphTape()
        with tape.capture():
            step()
    else:
        step()
        torch.cuda.synchronize()
        model.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        tape = torch.cuda.CUDAGraph()
        with torch.cuda.graph(tape):
            step()
    for rows in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        now, fresh = model.step(ForwardMode.DECODE, rows, [1] * 3)
        for name in ("req_pool_indices", "cache_seqlens", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(now, name))
        for mine, parts in zip(static, fresh):
            for x, new in zip(mine, parts):
                x.copy_(new.flatten(1))
        for out in outs:
            out.fill_(math.nan)
        model.backend.init_forward_metadata_out_graph(batch)
        tape.replay()
        for layer, (q, _, _) in enumerate(fresh):
            answer = model.expected(layer, q, rows, [1] * 3, True)
            got = outs[layer].unflatten(-1, (HEADS, DIM)).cpu()
            assert relative_error(got, answer) <= MAX_RELATIVE_ERROR[model.dtype]


def test_a_tape_serves_other_lengths():
    check_replays(Model(), None)


@pytest.mark.gpu
def test_a_graph_serves_other_lengths():
    check_replays(Model(device="cuda"), CudaGraphs)


def test_moved_tokens_take_their_labels_along():
    pool = DoubleSparseTokenToKVPool(64, 16, torch.float32, 2, 32, 1, heavy_channel_num=4)
    labels = [pages for pages in pool.all_buffers()[0] if pages.shape[-1] == 4]
    assert len(labels) == 1 and labels[0] is pool.get_label_buffer(0)
    assert pool.nbytes() == 64 * 2 * (32 + 32 + 4) * 4


def spec_of(**options):
    return AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, page_size=16, **options)


LIMITS = Limits(max_batch_size=2, max_seqlen=64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ds_heavy_channel_num": 65}, r"ds_heavy_channel_num must be in \[2, 64\], got 65"),
        ({"ds_heavy_token_num": 4096}, r"ds_heavy_token_num must be in \[1, 2048\], got 4096"),
        ({"ds_sparse_decode_threshold": -1}, "ds_sparse_decode_threshold must be in"),
        ({"sorted_channels": None}, "needs sorted_channels or ds_channel_config_path"),
        ({"sorted_channels": [torch.zeros(3, 64)]}, r"sorted_channels must be \[2, at least 32\]"),
        ({"sorted_channels": [torch.full((2, 64), 64)]}, r"sorted_channels must be in \[0, 64\)"),
    ],
)
def test_options_are_checked(options, words):
    given = {"sorted_channels": [torch.arange(64).expand(2, -1)]} | options
    with pytest.raises(ValueError, match=words):
        DoubleSparseAttnBackend(spec_of(), LIMITS, **given)


def test_what_is_not_served_is_refused():
    channels = {"sorted_channels": [torch.arange(64).expand(2, -1)]}
    for options in ({"sliding_window_size": 8}, {"attn_type": AttentionType.ENCODER_ONLY}):
        with pytest.raises(NotImplementedError, match="double_sparsity does not serve this model"):
            DoubleSparseAttnBackend(spec_of(**options), LIMITS, **channels)
    with pytest.raises(NotImplementedError, match="DoubleSparseAttnBackend"):
        get_backend_class("double_sparsity")
    backend = DoubleSparseAttnBackend(spec_of(), LIMITS, **channels)
    pools = [
        MHATokenToKVPool(64, 16, torch.float32, 2, 64, 1),
        DoubleSparseTokenToKVPool(64, 16, torch.float32, 2, 64, 1, heavy_channel_num=16),
    ]
    for pool, words in zip(pools, ("needs a DoubleSparseTokenToKVPool", "heavy_channel_num must be 32 .* got 16")):
        batch = AttentionBatch(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor([0]),
            cache_seqlens=torch.tensor([1], dtype=torch.int32),
            num_tokens=1,
            req_to_token=torch.arange(64, dtype=torch.int32).view(1, 64),
            out_cache_loc=torch.tensor([0]),
            tokens_per_request=1,
            token_to_kv_pool=pool,
            attn_backend=backend,
        )
        backend.init_forward_metadata(batch)
        layer = RadixAttention(4, 64, 0.1, 2, 0)
        with pytest.raises(ValueError, match=words):
            layer(torch.zeros(1, 256), torch.zeros(1, 128), torch.zeros(1, 128), batch)


def test_heavy_channels_of_a_file(tmp_path):
    order = torch.stack([torch.randperm(8) for _ in range(4)])
    config = {
        f"model.layers.{layer}.self_attn.{kind}_proj": order.tolist() for layer in range(3) for kind in ("k", "qk")
    }
    path = tmp_path / "channels.json"
    path.write_text(json.dumps(config))
    layers = load_heavy_channels(path, "k", 3, 4, 2, start_layer=1)
    assert len(layers) == 2 and torch.equal(layers[0], order[:, :3])
    grouped = load_heavy_channels(path, "qk", 8, 2, 1)[0]
    places = order.argsort(1).view(2, 2, 8).sum(1)
    assert (places.gather(1, grouped).diff(dim=1) >= 0).all() and grouped.sort(1).values.tolist() == [
        list(range(8))
    ] * 2
    for arguments, words in (
        (("v", 3, 4, 1), "ds_heavy_channel_type must be one of q, k, qk"),
        (("q", 3, 4, 1), "has no heavy channels model.layers.0.self_attn.q_proj"),
        (("k", 9, 4, 1), "at least 9"),
        (("k", 3, 3, 1), "a multiple of 3"),
    ):
        with pytest.raises(ValueError, match=words):
            load_heavy_channels(path, *arguments)
    with pytest.raises(ValueError, match="heavy_channel_num of a pool must be an even number"):
        DoubleSparseTokenToKVPool(64, 16, torch.float32, 2, 32, 1, heavy_channel_num=5)
