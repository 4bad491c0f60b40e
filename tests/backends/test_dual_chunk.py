"""Dual-chunk attention beside float64 over the rule: three parts of q, each for keys at another distance in chunks."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from attnops.backends import DualChunkFlashAttentionBackend, get_backend_class
from attnops.graphs import CudaGraphs
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits
from checks import MAX_RELATIVE_ERROR, relative_error
from graph_tape import GraphTape

HEADS, KV_HEADS, DIM, SCALE, CONTEXT = 4, 2, 64, 0.15, 256
IMPLS = ["fmha", "torch_native"]


class Model:
    def __init__(
        self, page_size, chunk_len, original, seed=0, *, device="cpu", dtype=torch.float32, v_dim=DIM, impl="fmha"
    ):
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.chunk_len, self.original, self.device, self.dtype, self.v_dim = chunk_len, original, device, dtype, v_dim
        context = -(-max(CONTEXT, 6 * chunk_len) // page_size) * page_size
        self.pool = MHATokenToKVPool(5 * context, page_size, dtype, KV_HEADS, DIM, 1, device=device, v_head_dim=v_dim)
        for pages in self.pool.all_buffers()[0]:
            pages.fill_(math.nan)
        order = torch.randperm(5 * context // page_size, generator=self.generator).view(5, -1, 1)
        self.table = (order * page_size + torch.arange(page_size)).flatten(1).int().to(device)
        spec = AttentionSpec(
            num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=v_dim, dtype=dtype, page_size=page_size
        )
        limits = Limits(max_batch_size=5, max_seqlen=context, max_num_tokens=600, max_tokens_per_request=3)
        options = {
            "chunk_size": chunk_len + 8,
            "local_size": 8,
            "original_max_position_embeddings": original,
            "impl": impl,
        }
        self.backend = DualChunkFlashAttentionBackend(spec, limits, device, **options)
        self.layer = RadixAttention(HEADS, DIM, SCALE, KV_HEADS, 0, v_head_dim=v_dim)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def step(self, mode, prefixes, new):
        """(batch, inputs, expected) of requests whose prefixes are stored."""
        rows = self.rng.sample(range(5), len(new))
        inputs, slots, expected = [], [], []
        for row, prefix, count in zip(rows, prefixes, new):
            k, v = self.draw(prefix + count, KV_HEADS, DIM), self.draw(prefix + count, KV_HEADS, self.v_dim)
            places = self.table[row, : prefix + count].long()
            self.pool.set_kv_buffer(self.layer, places[:prefix], k[:prefix], v[:prefix])
            q = self.draw(count, 5, HEADS, DIM)
            inputs.append((q.flatten(1), k[prefix:], v[prefix:]))
            slots.append(places[prefix:])
            expected.append(self.answer(q.cpu().double(), k.cpu().double(), v.cpu().double(), prefix))
        uniform = mode is not ForwardMode.EXTEND
        tensors = {"dtype": torch.int32, "device": self.device}
        batch = AttentionBatch(
            forward_mode=mode,
            req_pool_indices=torch.tensor(rows, device=self.device),
            cache_seqlens=torch.tensor([p + n for p, n in zip(prefixes, new)], **tensors),
            num_tokens=sum(new),
            req_to_token=self.table,
            out_cache_loc=torch.cat(slots),
            tokens_per_request=new[0] if uniform else 0,
            extend_seq_lens=None if uniform else torch.tensor(new, **tensors),
            token_to_kv_pool=self.pool,
            attn_backend=self.backend,
        )
        return batch, [torch.cat(parts) for parts in zip(*inputs)], torch.cat(expected)

    def answer(self, q, k, v, prefix):
        group, length = HEADS // KV_HEADS, len(k)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        factor = max(1.0, 0.1 * math.log(length / self.original) + 1.0) if self.original else 1.0
        out = torch.zeros(len(q), HEADS, self.v_dim, dtype=torch.float64)
        for i in range(len(q)):
            position = prefix + i
            chunk = position // self.chunk_len
            scores = []
            for j in range(position + 1):
                part = min(chunk - j // self.chunk_len, 2)  # 0: its own chunk, 1: the one before, 2: any other
                scores.append((q[i, part] * k[j]).sum(-1) * SCALE * factor)
            weights = torch.stack(scores).softmax(0)
            out[i] = torch.einsum("kh,khd->hd", weights, v[: position + 1])
        return out

    def run(self, mode, prefixes, new):
        batch, inputs, expected = self.step(mode, prefixes, new)
        self.backend.init_forward_metadata(batch)
        out = self.layer(*inputs, batch).unflatten(-1, (HEADS, self.v_dim))
        self.backend.raise_on_fault()
        # A factor is multiplied into q, which is rounded once more.
        bound = MAX_RELATIVE_ERROR[self.dtype] * (2 if self.original else 1)
        assert relative_error(out.cpu(), expected) <= bound
        return batch, inputs, out


def serve(model):
    chunk = model.chunk_len
    model.run(ForwardMode.EXTEND, [0, 0, 3, chunk], [chunk, 1, 3 * chunk + 2, 5])
    model.run(ForwardMode.EXTEND, [2 * chunk, 2 * chunk - 1], [chunk + 1, 2])
    model.run(ForwardMode.DECODE, [0, chunk - 1, chunk, 2 * chunk, 4 * chunk + 3], [1] * 5)
    model.run(ForwardMode.TARGET_VERIFY, [0, chunk - 1, 3 * chunk - 2], [3] * 3)


@pytest.mark.parametrize("page_size, chunk_len", [(1, 16), (1, 7), (8, 16), (16, 32)])
@pytest.mark.parametrize("original", [0, 20])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_mode(page_size, chunk_len, original, impl, monkeypatch):
    monkeypatch.setenv("ATTNOPS_CHECK", "1")
    serve(Model(page_size, chunk_len, original, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_values_of_another_head_dim(impl):
    serve(Model(8, 16, 0, v_dim=32, impl=impl))


def check_replays(model, recorder):
    """Decode steps of other lengths through one graph, bit for bit."""
    first, inputs, _ = model.step(ForwardMode.DECODE, [40, 3, 90], [1] * 3)
    model.backend.init_cuda_graph_state(3, 3)
    model.backend.init_forward_metadata(first)
    model.layer(*inputs, first)
    model.backend.init_forward_metadata_out_graph(first, in_capture=True)
    with recorder.capture():
        model.backend.init_forward_metadata_in_graph(first)
        out = model.layer(*inputs, first)
    for _ in range(10):
        prefixes = [model.rng.randrange(CONTEXT - 1) for _ in range(3)]
        batch, others, eager = model.run(ForwardMode.DECODE, prefixes, [1] * 3)
        for name in ("req_pool_indices", "cache_seqlens", "out_cache_loc"):
            getattr(first, name).copy_(getattr(batch, name))
        for mine, new in zip(inputs, others):
            mine.copy_(new)
        model.backend.init_forward_metadata_out_graph(first)
        recorder.replay()
        assert torch.equal(out.view_as(eager), eager)


@pytest.mark.parametrize("impl", IMPLS)
def test_graphs_of_decodes(impl):
    check_replays(Model(8, 16, 20, impl=impl), GraphTape())


@pytest.mark.gpu
@pytest.mark.parametrize("page_size, chunk_len", [(1, 16), (16, 32), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", IMPLS)
def test_on_a_gpu(page_size, chunk_len, dtype, impl):
    options = {"device": "cuda", "dtype": dtype, "impl": impl}
    serve(Model(page_size, chunk_len, 20, **options))
    check_replays(Model(page_size, chunk_len, 0, **options), CudaGraphs("cuda")())


def test_errors_name_what_is_wrong():
    model = Model(8, 16, 0)
    spec, limits = model.backend.spec, model.backend.limits
    with pytest.raises(NotImplementedError, match="dual_chunk_flash_attn has no sparse variant"):
        DualChunkFlashAttentionBackend(spec, limits, sparse_attention_config={})
    with pytest.raises(ValueError, match=r"chunk_size - local_size must be a positive multiple of 8 .*, got 4"):
        DualChunkFlashAttentionBackend(spec, limits, chunk_size=12, local_size=8)
    with pytest.raises(ValueError, match="impl of dual_chunk_flash_attn must be fmha or torch_native, got 'fa3'"):
        DualChunkFlashAttentionBackend(spec, limits, impl="fa3")
    batch, (q, k, v), _ = model.step(ForwardMode.DECODE, [4], [1])
    model.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="q of dual-chunk attention must have 1280 columns, 5 parts of 4 heads of 64"):
        model.layer(q[:, : HEADS * DIM], k, v, batch)
    tree = torch.ones(1, 1, 1, dtype=torch.uint8)
    verify = dataclasses.replace(batch, forward_mode=ForwardMode.TARGET_VERIFY, tree_mask=tree)
    with pytest.raises(NotImplementedError, match="a tree mask and dual chunks exclude each other"):
        model.backend.init_forward_metadata(verify)


@pytest.mark.parametrize("name", ["torch_native", "intel_amx", "fa3", "trtllm_mha", "flex_attention"])
def test_other_backends_refuse_five_parts_by_name(name):
    """One backend serves dual chunks on both devices; others see queries that are too wide."""
    model = Model(16, 32, 0)
    batch, inputs, _ = model.step(ForwardMode.DECODE, [40], [1])
    backend = get_backend_class(name)(model.backend.spec, model.backend.limits)
    batch.attn_backend = backend
    backend.init_forward_metadata(batch)
    with pytest.raises((ValueError, RuntimeError), match=r"q must have .*1280"):
        model.layer(*inputs, batch)
