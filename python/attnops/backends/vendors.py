"""Attention packages of other vendors as backends: thin, taken by name only, and but for `fa4` on Hopper untested.

Each is one call of a function that its vendor published, over pages that attnops fills.
`tests/backends/test_vendors.py` holds every keyword to that function's signature.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnops import ops
from attnops.backends.base import AttentionBackend, LayerCall, is_causal
from attnops.backends.capability import DECODER_MODES, SIXTEEN_BIT, Capability, HeadDims
from attnops.backends.machine import PACKAGES, detect_machine
from attnops.backends.prepared import PreparedStep
from attnops.backends.registry import register_attention_backend
from attnops.backends.store import heads, store_kv, store_mla, uses_window_slots
from attnops.graph_buffers import PagedBuffers, PagedStep
from attnops.types import MLA_KV_LORA_RANK, AttentionBatch, AttentionSpec, ForwardMode, Limits

_ASCEND_MASK = 2048  # queries and keys of the one mask that sparse_mode 3 takes, whatever the lengths


@dataclasses.dataclass
class VendorStep:
    """Views of a step's metadata, and what the host knows of it.

    Attributes:
        bounds_q: int32 ``[B + 1]``: where each request's queries begin.
        max_q: Most queries of a request.
        lengths: Queries and keys of each request, for functions that plan on the host.
        behind: By whether the table is that of a sliding-window pool: each request's last page, and its tokens that
            lie behind the request. Made by the first layer that needs them.
    """

    paged: PagedStep
    bounds_q: Tensor
    max_q: int
    lengths: tuple[list[int], list[int]] = ([], [])
    behind: dict[bool, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class VendorCall:
    """One layer's call, in the forms that vendors take it.

    Attributes:
        q: ``[T, H_q, D]``.
        k_pages, v_pages: ``[P, page_size, H_kv, D]``.
        table: int32 ``[B, max_pages]``; of MLA where pages are widened, by tokens, and pages are of one.
        indptr, indices: The same as CSR, by tokens; only where pages of K and V are widened.
        new: k and v of the step's tokens, of backends with `reads_new_tokens`, but in decode: tables are then of the
            tokens before them.
        windowed: The table and pages are those of a sliding-window pool.
        q_pe: MLA: the rotary part of queries, and q the rest; k_pages the rotary part of the cache, v_pages the rest.
        lens: int32 ``[B]``.
        window: Keys to the left of a query that it sees; -1: all.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    indptr: Tensor | None
    indices: Tensor | None
    lens: Tensor
    step: VendorStep
    scale: float
    causal: bool
    window: int
    cap: float
    sinks: Tensor | None
    max_seqlen_k: int
    is_decode: bool
    windowed: bool = False
    new: tuple[Tensor, Tensor] | None = None
    q_pe: Tensor | None = None

    @property
    def window_pair(self) -> tuple[int, int]:
        """FlashAttention's form: both sides inclusive, -1: off."""
        return (self.window, 0) if self.window >= 0 else (-1, -1)


class VendorBackend(AttentionBackend):
    """What the names below are.

    Attributes:
        module, function: Where the vendor's function is.
        call: From the function and a `VendorCall` to the output ``[T, H_q, D]``.
        reads_new_tokens: Its steps other than decode take their own tokens from k and v.
        tested_archs: GPUs that it has run on, as of `Machine.arch`; on others it says that nobody has.
    """

    module: ClassVar[str]
    function: ClassVar[str]
    call: ClassVar[Any]
    reads_new_tokens: ClassVar[bool] = False
    tested_archs: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, spec: AttentionSpec, limits: Limits, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, limits, device)
        self._function = self._load()
        self._say_untested()
        self._first_call = True
        self._buffers = PagedBuffers(spec, limits, self.device)
        size = limits.max_batch_size
        self._index = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        self._bounds_q = torch.zeros_like(self._index)
        self._widens = self.capability.mla_widens_pages if spec.is_mla else self.capability.widens_pages
        shape = (size, limits.max_seqlen) if self._widens else (0, 0)
        self._indptr = torch.zeros_like(self._index)
        tables = {w: torch.zeros(shape, dtype=torch.int32, device=self.device) for w in (False, True)}
        self._token_table, self._indices = tables[False], {w: table.view(-1) for w, table in tables.items()}
        self._prepared: PreparedStep[VendorStep] = PreparedStep()

    def _say_untested(self) -> None:
        """When it is built, and again at its first call: a server may have been built by somebody else."""
        if self.device.type == "cuda" and detect_machine(self.device).arch in self.tested_archs:
            return
        warnings.warn(
            f"attnops: nobody has run backend {self.name} on its hardware; compare its results with another backend's",
            stacklevel=3,
        )

    def _load(self) -> Any:
        try:
            return getattr(importlib.import_module(self.module), self.function)
        except ImportError as error:
            package = PACKAGES[self.capability.package or ""]
            raise ImportError(
                f"attnops: backend {self.name} needs the package {package} ({error}). Without it select_backend takes "
                "the next that serves the model"
            ) from error

    @property
    def fault_report(self) -> Tensor | None:
        return self._buffers.report

    def init_forward_metadata_out_graph(self, batch: AttentionBatch, in_capture: bool = False) -> None:
        if in_capture:
            raise NotImplementedError(f"attnops: steps of backend {self.name} are not captured: use SegmentRunner")
        self.limits.check(batch)
        paged, tokens = self._buffers.step(batch), batch.tokens_per_request
        bounds = paged.cu_seqlens_q
        if bounds is None:
            bounds = self._bounds_q[: batch.batch_size + 1]
        step = VendorStep(paged, bounds, tokens if batch.is_uniform else batch.max_seqlen_q)
        if self.capability.needs_cpu_seq_lens:
            step.lengths = self._lengths(batch)
        self._prepared.begin(batch, step)

    def _lengths(self, batch: AttentionBatch) -> tuple[list[int], list[int]]:
        new = None if batch.is_uniform else batch.extend_seq_lens_cpu
        if batch.cache_seqlens_cpu is None or (new is None and not batch.is_uniform):
            raise ValueError(
                f"attnops: backend {self.name} plans on the host and needs cache_seqlens_cpu, and extend_seq_lens_cpu "
                "in ragged steps"
            )
        queries = [batch.tokens_per_request] * batch.batch_size if new is None else new.tolist()
        return queries, batch.cache_seqlens_cpu.tolist()

    def init_forward_metadata_in_graph(self, batch: AttentionBatch) -> None:
        step = self._prepared.plan(batch)
        if batch.num_tokens == 0:
            return
        self._buffers.build(step.paged, batch)
        if batch.is_uniform:
            torch.mul(self._index[: batch.batch_size + 1], batch.tokens_per_request, out=step.bounds_q)
        if not self._widens:
            return
        assert batch.req_to_token is not None and batch.token_to_kv_pool is not None, "PagedBuffers.build has checked"
        slot_map, lens = batch.token_to_kv_pool.slot_map, batch.cache_seqlens
        if self.spec.is_mla:
            table, report = self._token_table[: batch.batch_size], self._buffers.report
            ops.build_page_table(batch.req_to_token, batch.req_pool_indices, lens, 1, page_table=table, report=report)
            return
        if self._takes_new(batch):
            new = batch.tokens_per_request if batch.is_uniform else batch.extend_seq_lens
            lens = lens - new  # type: ignore[operator]
        for windowed in (False, True) if slot_map is not None else (False,):
            ops.build_kv_indices(
                batch.req_to_token,
                batch.req_pool_indices,
                lens,
                1,
                kv_indptr=self._indptr[: batch.batch_size + 1],
                kv_indices=self._indices[windowed],
                slot_map=slot_map if windowed else None,
                report=self._buffers.report,
            )

    def _store(self, call: LayerCall, step: VendorStep) -> None:
        if not self.spec.is_mla and (call.q_rope is not None or call.k_rope is not None):
            raise ValueError("attnops: q_rope and k_rope belong to MLA layers")
        if not call.save_kv_cache or call.k is None:
            return
        if self.spec.is_mla:
            store_mla(call.layer, call.batch, call.k, call.k_rope, self._buffers.report)
            return
        if call.v is None:
            raise ValueError("attnops: a layer that stores k needs v")
        store_kv(call.layer, call.batch, step.paged, call.k, call.v, self._buffers.report)

    def _queries(self, call: LayerCall) -> tuple[Tensor, Tensor | None]:
        """With heads; of MLA the latent and the rotary part."""
        layer = call.layer
        if not self.spec.is_mla:
            return heads("q", call.q, layer.num_heads, layer.head_dim), None
        if call.q_rope is None:
            whole = heads("q", call.q, layer.num_heads, layer.head_dim)
            return whole[..., :MLA_KV_LORA_RANK], whole[..., MLA_KV_LORA_RANK:]
        rope = layer.head_dim - MLA_KV_LORA_RANK
        latent = heads("q", call.q, layer.num_heads, MLA_KV_LORA_RANK)
        return latent, heads("q_rope", call.q_rope, layer.num_heads, rope)

    def _takes_new(self, batch: AttentionBatch) -> bool:
        return self.reads_new_tokens and not batch.forward_mode.is_decode()

    def attend(self, call: LayerCall) -> None:
        step, layer, batch = self._prepared.of(call.batch), call.layer, call.batch
        if self._first_call:
            self._say_untested()
            self._first_call = False
        if batch.tree_mask is not None:
            raise NotImplementedError(f"attnops: backend {self.name} serves chains, the batch has a tree_mask")
        pool = batch.token_to_kv_pool
        assert pool is not None, "PagedBuffers.build has checked"
        self._store(call, step)
        windowed = uses_window_slots(layer, pool)
        table = step.paged.window_page_table if windowed else step.paged.page_table
        assert table is not None
        lists = self._widens and not self.spec.is_mla
        k_pages, v_pages = pool.get_kv_buffer(layer.layer_id)
        q, q_pe = self._queries(call)
        if q_pe is not None:
            if self._widens:
                table, k_pages = self._token_table[: batch.batch_size], k_pages.flatten(0, 1).unsqueeze(1)
            v_pages, k_pages = k_pages[..., :MLA_KV_LORA_RANK], k_pages[..., MLA_KV_LORA_RANK:]
        made = VendorCall(
            q=q,
            k_pages=k_pages,
            v_pages=v_pages,
            table=table,
            indptr=self._indptr[: batch.batch_size + 1] if lists else None,
            indices=self._indices[windowed] if lists else None,
            lens=batch.cache_seqlens,
            step=step,
            scale=layer.scaling,
            causal=is_causal(layer),
            window=layer.sliding_window_size,
            cap=layer.logit_cap,
            sinks=layer.sinks,
            max_seqlen_k=self.limits.max_seqlen,
            is_decode=batch.forward_mode.is_decode(),
            windowed=windowed,
            q_pe=q_pe,
        )
        if self._takes_new(batch) and call.k is not None and call.v is not None:
            k = heads("k", call.k, layer.num_kv_heads, layer.head_dim)
            made = dataclasses.replace(made, new=(k, heads("v", call.v, layer.num_kv_heads, layer.v_head_dim)))
        out = heads("out", call.out, layer.num_heads, layer.v_head_dim)
        out.copy_(type(self).call(self._function, made).view(out.shape))


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple | list) else result


def _clear_behind_requests(c: VendorCall) -> None:
    """Writes zeros over the values behind each request's end in its last page.

    No request has anything there, but NaN may lie there, and FlashAttention-4 multiplies it by a probability of 0.
    """
    if c.windowed not in c.step.behind:
        c.step.behind[c.windowed] = _behind_requests(c.table, c.lens, c.v_pages.shape[1])
    pages, hidden = c.step.behind[c.windowed]
    c.v_pages[pages] = c.v_pages[pages].masked_fill(hidden, 0)


def _behind_requests(table: Tensor, lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Last pages ``[B]``, and bool ``[B, page_size, 1, 1]``. Requests without keys repeat the longest one."""
    row = torch.where(lens > 0, torch.arange(len(lens), device=lens.device), lens.argmax())
    last = lens.long()[row] - 1  # -1 where no request has keys: then nothing is hidden
    pages = table[row, last.clamp_min(0) // page_size].long()
    hidden = torch.arange(page_size, device=lens.device) > last.remainder(page_size).unsqueeze(1)
    return pages, hidden[..., None, None]


def _fa4(function: Any, c: VendorCall) -> Tensor:
    if c.q_pe is None:  # pages of one token have nothing behind it
        _clear_behind_requests(c)
    result = function(
        c.q if c.q_pe is None else c.q_pe.contiguous(),
        c.k_pages,
        c.v_pages,
        qv=None if c.q_pe is None else c.q.contiguous(),
        cu_seqlens_q=c.step.bounds_q,
        max_seqlen_q=c.step.max_q,
        seqused_k=c.lens,
        page_table=c.table,
        softmax_scale=c.scale,
        causal=c.causal,
        window_size=(c.window, 0) if c.window >= 0 else (None, None),
        softcap=c.cap,
        learnable_sink=None if c.sinks is None else c.sinks.to(torch.bfloat16),
    )
    return _first(result)


def _aiter(function: Any, c: VendorCall) -> Tensor:
    result = function(
        c.q,
        c.k_pages.flatten(0, 1),
        c.v_pages.flatten(0, 1),
        cu_seqlens_q=c.step.bounds_q,
        kv_indptr=c.indptr,
        kv_page_indices=c.indices,
        max_seqlen_q=c.step.max_q,
        max_seqlen_k=c.max_seqlen_k,
        softmax_scale=c.scale,
        logits_soft_cap=c.cap,
        causal=c.causal,
        window_size=c.window_pair,
    )
    return _first(result)


def _intel_xpu(function: Any, c: VendorCall) -> Tensor:
    result = function(
        q=c.q,
        k_cache=c.k_pages,
        v_cache=c.v_pages,
        page_table=c.table,
        cache_seqlens=c.lens,
        cu_seqlens_q=c.step.bounds_q,
        max_seqlen_q=c.step.max_q,
        softmax_scale=c.scale,
        causal=c.causal,
        window_size=c.window_pair,
        softcap=c.cap,
        sinks=c.sinks,
    )
    return _first(result)


@functools.cache
def _ascend_mask(device: torch.device) -> Tensor:
    return torch.ones(_ASCEND_MASK, _ASCEND_MASK, dtype=torch.bool, device=device).triu(1)


def _ascend(function: Any, c: VendorCall) -> Tensor:
    queries, keys = c.step.lengths
    result = function(
        query=c.q,
        key=c.k_pages.flatten(2),
        value=c.v_pages.flatten(2),
        block_table=c.table,
        block_size=c.k_pages.shape[1],
        atten_mask=_ascend_mask(c.q.device),
        input_layout="TND",
        actual_seq_lengths=list(itertools.accumulate(queries)),
        actual_seq_lengths_kv=keys,
        num_heads=c.q.shape[1],
        num_key_value_heads=c.k_pages.shape[2],
        scale=c.scale,
        sparse_mode=3,
    )
    return _first(result)


def _capability(device: str, package: str, **options: Any) -> Capability:
    return Capability(
        devices=frozenset({device}),
        package=package,
        dtypes=SIXTEEN_BIT,
        **{"untested_on_hardware": True, "modes": DECODER_MODES, "head_dims": HeadDims(64, 256, 8), **options},
    )


@register_attention_backend("fa4")
class FA4Backend(VendorBackend):
    """Prefill of FlashAttention-4 on Hopper and later, over pages of 128; MLA on Blackwell, over tables of tokens."""

    capability = _capability(
        "cuda",
        "flash_attn.cute",
        untested_on_hardware=False,
        chosen_on=frozenset(),
        archs=frozenset({90, 100, 103}),
        needs_cuda_kernels=False,
        compiles_at_run_time=True,
        modes=frozenset({ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE}),
        head_dims=HeadDims(pairs=frozenset({(64, 64), (96, 96), (128, 128)})),
        page_sizes=frozenset({128}),
        mla=True,
        mla_archs=frozenset({100, 103}),  # its kernels for Hopper take no `qv`
        mla_page_sizes=frozenset(),
        mla_widens_pages=True,  # they know pages of one token
        sliding_window=True,
        swa_pool=True,
        logit_cap=True,
        sinks=True,
    )
    module, function, call = "flash_attn.cute.interface", "flash_attn_varlen_func", staticmethod(_fa4)
    tested_archs = frozenset({90})


@register_attention_backend("aiter")
class AiterBackend(VendorBackend):
    """AMD's batch prefill, for every step. Its tables are of tokens."""

    capability = _capability("hip", "aiter", widens_pages=True, sliding_window=True, swa_pool=True, logit_cap=True)
    module, function, call = "aiter", "mha_batch_prefill_func", staticmethod(_aiter)


@register_attention_backend("intel_xpu")
class IntelXpuBackend(VendorBackend):
    """The XPU build of SGLang's FlashAttention."""

    capability = _capability(
        "xpu",
        "sgl_kernel",
        page_sizes=frozenset({64, 128}),
        sliding_window=True,
        swa_pool=True,
        logit_cap=True,
        sinks=True,
    )
    module, function, call = "sgl_kernel.flash_attn", "flash_attn_with_kvcache", staticmethod(_intel_xpu)


@register_attention_backend("ascend")
class AscendBackend(VendorBackend):
    """torch-npu's fused inference attention, over pages of 128 tokens, planned on the host."""

    capability = _capability("npu", "torch_npu", page_sizes=frozenset({128}), needs_cpu_seq_lens=True)
    needs_cpu_seq_lens = True
    module, function, call = "torch_npu", "npu_fused_infer_attention_score", staticmethod(_ascend)
