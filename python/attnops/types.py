"""What a model, a step and their limits look like to attention: plain data, no kernels and no devices' work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attnops.modes import AttentionType, ForwardMode

MLA_KV_LORA_RANK = 512
MLA_ROPE_DIM = 64
COMPRESS_RATIOS = (0, 4, 128)  # of layers of DeepSeek-V4


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """A model's attention, as far as the choice of a backend depends on it.

    Args:
        num_q_heads, num_kv_heads: Heads on this rank; the first is a multiple of the second.
        head_dim: Of q and k. For MLA 576, the latent and the rotary part.
        v_head_dim: Of v and the output; -1: as `head_dim`. For MLA 512.
        dtype: Of q and the output.
        kv_dtype: Of the cache; None: as `dtype`. `torch.uint8` with MLA: rows of 656 bytes, e4m3 with scales.
        page_size: Tokens per page.
        sliding_window_size: Of those layers that have one: a query sees this many keys before itself (and itself).
            -1: no layer has one. Layers without a window may stand beside layers with this one.
        logit_cap: ``cap * tanh(s / cap)`` on the scaled scores; 0.0: off.
        has_sinks: Layers carry a logit per head that takes probability and gives no value.
        is_mla: Queries are absorbed into the latent space and the cache holds latents.
        attn_type: Of the layers.
        deterministic: A request's output has the same bits whatever else is in its batch.
        fp8_products: MLA over a float8_e4m3fn cache: kernels may round q and the probabilities to e4m3
            (`ops.mla_decode`). That is faster with many heads, and off by some 4 % instead of 0.2 %. Nothing is rounded
            unless asked.
        up_head_dims: MLA: (head_dim, v_head_dim) of keys and values that the model's layers make of latents
            (`layers.UpProjection`). Prefill then takes queries that are not absorbed. None: queries are always
            absorbed.
        attention_chunk_size: Of those layers that attend locally (Llama 4): a query at position p sees the keys at
            ``[p // n * n, p]``. 0: no layer does. A multiple of `page_size`. Other layers may stand beside them.
        sparse_topk: MLA: of those layers whose query tokens attend to the rows that a list names
            (`RadixAttention.forward`, `topk_indices`): columns of a list. 0: no layer does. Others may stand beside
            them.
        compress_ratios: DeepSeek-V4 (`layers.CompressedAttention`): 0, 4 or 128 of each layer, or of each kind:
            how many tokens an entry pools, beside the window of `sliding_window_size`. Layers of ratio 4 attend to
            `sparse_topk` entries, layers of ratio 128 to all. Rows are of 584 bytes. (): another model.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = -1
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    page_size: int = 64
    sliding_window_size: int = -1
    logit_cap: float = 0.0
    has_sinks: bool = False
    is_mla: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    deterministic: bool = False
    fp8_products: bool = False
    up_head_dims: tuple[int, int] | None = None
    attention_chunk_size: int = 0
    sparse_topk: int = 0
    compress_ratios: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "sliding_window_size"):
            _require_int(name, getattr(self, name))
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)
            if not isinstance(value, torch.dtype) and (value is not None or name == "dtype"):
                raise TypeError(f"{name} must be a torch.dtype, got {value!r}")
        heads = (self.num_q_heads, self.num_kv_heads)
        _require(min(heads) > 0, f"num_q_heads and num_kv_heads must be positive, got {heads[0]} and {heads[1]}")
        _require(self.head_dim > 0, f"head_dim must be positive, got {self.head_dim}")
        _require(0 <= self.logit_cap < math.inf, f"logit_cap must be 0 (off) or positive, got {self.logit_cap}")
        _require(
            self.num_q_heads % self.num_kv_heads == 0,
            f"num_q_heads ({self.num_q_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        _require(self.page_size > 0, f"page_size must be positive, got {self.page_size}")
        _require(self.sliding_window_size >= -1, f"sliding_window_size must be -1 or more: {self.sliding_window_size}")
        object.__setattr__(self, "v_head_dim", v_head_dim_of("AttentionSpec", self.head_dim, self.v_head_dim))
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self.dtype)
        _require(
            not self.fp8_products or (self.is_mla and self.kv_dtype == torch.float8_e4m3fn),
            f"fp8_products belongs to MLA over a float8_e4m3fn cache, got is_mla {self.is_mla} and {self.kv_dtype}",
        )
        _require_int("attention_chunk_size", self.attention_chunk_size)
        chunk, plain = self.attention_chunk_size, not self.is_mla and self.attn_type is AttentionType.DECODER
        _require(chunk == 0 or plain, "attention_chunk_size belongs to causal layers with K and V of their own")
        _require(
            chunk >= 0 and chunk % self.page_size == 0,
            f"attention_chunk_size ({chunk}) must be a multiple of page_size ({self.page_size}), or 0",
        )
        _require_int("sparse_topk", self.sparse_topk)
        _require(
            self.sparse_topk == 0 or (self.is_mla and self.sparse_topk > 0),
            f"sparse_topk belongs to MLA and must not be negative, got {self.sparse_topk}",
        )
        _require(self.is_mla or self.up_head_dims is None, f"up_head_dims belongs to MLA, got {self.up_head_dims}")
        if self.is_mla:
            dims = (MLA_KV_LORA_RANK + (0 if self.compress_ratios else MLA_ROPE_DIM), MLA_KV_LORA_RANK)
            _require(self.num_kv_heads == 1, f"MLA has one latent head, got num_kv_heads {self.num_kv_heads}")
            _require(
                (self.head_dim, self.v_head_dim) == dims,
                f"MLA has head_dim {dims[0]} and v_head_dim {dims[1]}, got {self.head_dim} and {self.v_head_dim}",
            )
        if self.compress_ratios:
            self._check_compressed()

    @classmethod
    def mla(cls, num_q_heads: int, **options: object) -> AttentionSpec:
        """An MLA model with absorbed queries: 512 latent and 64 rotary dimensions. Options as of `AttentionSpec`."""
        dims = {"head_dim": MLA_KV_LORA_RANK + MLA_ROPE_DIM, "v_head_dim": MLA_KV_LORA_RANK}
        return cls(num_q_heads=num_q_heads, num_kv_heads=1, is_mla=True, **dims, **options)  # type: ignore[arg-type]

    @classmethod
    def deepseek_v4(cls, num_q_heads: int, compress_ratios: Sequence[int], **options: Any) -> AttentionSpec:
        """A model of `compress_ratios`: 512 dimensions that are key and value, sinks, a window of 128 tokens.

        Options as of `AttentionSpec`; `page_size` is 256 by default.
        """
        dims: dict[str, Any] = {"head_dim": MLA_KV_LORA_RANK, "v_head_dim": MLA_KV_LORA_RANK, "is_mla": True}
        dims |= {"num_kv_heads": 1, "compress_ratios": tuple(compress_ratios), "kv_dtype": torch.uint8}
        rest: dict[str, Any] = {"page_size": 256, "sliding_window_size": 127, "has_sinks": True}
        return cls(num_q_heads=num_q_heads, **(dims | rest | options))

    def _check_compressed(self) -> None:
        ratios = self.compress_ratios
        known = isinstance(ratios, tuple) and set(ratios) <= set(COMPRESS_RATIOS)
        _require(known, f"compress_ratios must be a tuple of 0, 4 and 128, got {ratios!r}")
        _require(self.is_mla, "compress_ratios belong to MLA")
        _require(self.kv_dtype == torch.uint8, f"compress_ratios need kv_dtype uint8, got {self.kv_dtype}")
        _require(self.sliding_window_size >= 0, "compress_ratios need sliding_window_size")
        largest = max(ratios)
        _require(
            largest == 0 or self.page_size % largest == 0,
            f"page_size ({self.page_size}) must be a multiple of compress_ratios, {largest} among them",
        )
        _require(
            (4 in ratios) == (self.sparse_topk > 0),
            f"sparse_topk belongs to compress_ratios of 4, got {self.sparse_topk} and {ratios}",
        )

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def windows(self) -> tuple[int, ...]:
        """Every `window_left` that a layer may have: off, and the model's window where there is one."""
        return (-1,) if self.sliding_window_size < 0 else (-1, self.sliding_window_size)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest step that a backend will ever see. It allocates for these, once, when it is built.

    Args:
        max_batch_size: Requests per step.
        max_seqlen: Tokens per request, cached and new.
        max_num_tokens: New tokens per step, all requests together; at least those of a step of verification.
        max_tokens_per_request: Query tokens per request of a verify (or uniform draft extend) step.
    """

    max_batch_size: int
    max_seqlen: int
    max_num_tokens: int = 0
    max_tokens_per_request: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seqlen", "max_num_tokens", "max_tokens_per_request"):
            _require_int(name, getattr(self, name))
        for name in ("max_batch_size", "max_seqlen", "max_tokens_per_request"):
            _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        _require(self.max_num_tokens >= 0, f"max_num_tokens must not be negative, got {self.max_num_tokens}")
        least = self.max_batch_size * self.max_tokens_per_request
        object.__setattr__(self, "max_num_tokens", max(self.max_num_tokens, least))

    def max_pages(self, page_size: int) -> int:
        return -(-self.max_seqlen // page_size)

    def check(self, batch: AttentionBatch) -> None:
        """Raises ValueError, naming the limit, when what the host knows of `batch` exceeds it."""
        for name, got, limit in (
            ("max_batch_size", batch.batch_size, self.max_batch_size),
            ("max_num_tokens", batch.num_tokens, self.max_num_tokens),
            ("max_seqlen", batch.max_cache_seqlen or 0, self.max_seqlen),
        ):
            _require(got <= limit, f"attnops: the batch has {got}, above {name} = {limit} of the backend")
        if batch.is_uniform:
            got, limit = batch.tokens_per_request, self.max_tokens_per_request
            _require(got <= limit, f"attnops: {got} tokens per request, above max_tokens_per_request = {limit}")


class AttentionLayer(Protocol):
    """What a pool asks of a layer."""

    layer_id: int


class TokenPool(Protocol):
    """What a batch's cache is to those who only hold it; `attnops.pools.KVCache` is one."""

    page_size: int
    num_pages: int
    dtype: torch.dtype
    slot_map: Tensor | None

    @property
    def buffers_version(self) -> int: ...

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]: ...

    def all_buffers(self) -> tuple[list[Tensor], list[Tensor]]: ...


class LayerServer(Protocol):
    """What answers a layer; arguments as of `attnops.backends.AttentionBackend.forward`."""

    @property
    def forward(self) -> Callable[..., Tensor]: ...


class StepBackend(LayerServer, Protocol):
    """What serves a batch's step; `attnops.backends.AttentionBackend` is one."""

    def init_forward_metadata(self, batch: AttentionBatch) -> None: ...

    def takes_absorbed(self, batch: AttentionBatch) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class MultiItemScoringParams:
    """Prompts of a prefix and items, each of which sees the prefix and itself (FlashInfer's names).

    Args:
        prefix_len_ptr: int ``[B]``: tokens of each prompt before its first delimiter.
        token_pos_in_items_ptr: int ``[B * n]``: of each token behind the prefix its place in its item, the delimiter's
            being 0; n places per prompt.
        token_pos_in_items_len: n.
        max_item_len_ptr: int ``[B]``, the longest item of each prompt, or None. Nothing depends on it.

    A token of place t at position p sees the prefix, and the positions in ``(p - t, p]``.

    Raises:
        ValueError: the tensors' shapes do not fit.
    """

    prefix_len_ptr: Tensor
    token_pos_in_items_ptr: Tensor
    token_pos_in_items_len: int
    max_item_len_ptr: Tensor | None = None

    def __post_init__(self) -> None:
        size, got = self.prefix_len_ptr.numel(), tuple(self.token_pos_in_items_ptr.shape)
        expected = (size * self.token_pos_in_items_len,)
        _require(self.prefix_len_ptr.dim() == 1, f"prefix_len_ptr must have one dimension, got {size} elements")
        _require(got == expected, f"token_pos_in_items_ptr must have shape {expected}, got {got}")

    def places(self, request: Tensor, behind: Tensor) -> Tensor:
        """int64 places of tokens that stand `behind` tokens behind the prefixes of `request`, both int64."""
        if not self.token_pos_in_items_len:
            return torch.zeros_like(behind)
        at = request * self.token_pos_in_items_len + behind.clamp(max=self.token_pos_in_items_len - 1)
        return self.token_pos_in_items_ptr.long()[at]


@dataclass(kw_only=True)
class AttentionBatch:
    """One step of the model, as attention sees it (SGLang: `ForwardBatch`). Lengths live on the device only.

    A graph runner makes one with static tensors and overwrites their contents between replays.

    Args:
        forward_mode: What the tokens are.
        req_pool_indices: int32 or int64 ``[B]``, rows of `req_to_token`.
        cache_seqlens: int32 ``[B]``, tokens in the cache, the new ones included. Padding rows of a graph hold
            `get_cuda_graph_seq_len_fill_value()`, never 0.
        req_to_token: int32 ``[max_requests, max_context]``, slot of each token. None for an encoder.
        out_cache_loc: int64 ``[num_tokens]``, slots of the new tokens; negative: padding, not stored.
        num_tokens: New tokens, all requests together (host), and rows that pad a ragged step behind them.
        tokens_per_request: Of DECODE (1, or the branches of a draft loop), TARGET_VERIFY and a uniform DRAFT_EXTEND; 0:
            ragged.
        draft_steps: Of a draft loop's DECODE step: drafts of a branch. Branches are then tokens of one request, and
            share its prefix. Behind it stand the cells of all drafts, the i-th of branch k at ``k * draft_steps + i``.
            `cache_seqlens` counts all of them. 0: not such a step.
        draft_step: Which step of the loop it is, from 0: each row sees as many drafts, and itself. None: unknown, and
            rows may see any number. Windows, and backends that plan on the host, need to know.
        extend_seq_lens: int32 ``[B]``, new tokens per request; needed when ragged.
        max_seqlen_q: Upper bound of the new tokens per request (host); by default `num_tokens`. A bound too low for
            `num_tokens`, padding included, is an error. A bound too low for one request is not seen, and its tokens are
            wrong. Bounds choose kernels: steps of unequal ones may differ in the last bits.
        max_cache_seqlen: Upper bound of `cache_seqlens` (host), or None: unknown; only saves work. As `max_seqlen_q`.
        max_prefix_tokens: Upper bound of the tokens cached before the new ones, all requests together (host), or None:
            unknown; 0 of prompts that nobody has begun. Only saves work.
        cache_seqlens_cpu, extend_seq_lens_cpu: int32 ``[B]`` on the CPU, the same values, for a backend that plans on
            the host (`Capability.needs_cpu_seq_lens`); nobody else reads them.
        positions: int64 ``[num_tokens]``, for the model's rotary embedding; attention does not read it.
        tree_mask: uint8 ``[B, tokens_per_request, ceil(M / 8)]``, bit j of row i: token i sees the j-th of the last M.
            M is `tokens_per_request` in TARGET_VERIFY, and times `draft_steps` in a draft step.
        multi_item: The prompts of an EXTEND step are a prefix and items.
        encoder_lens: int32 ``[B]``, of an encoder-decoder model: tokens of each request's encoder, 0: none. Their slots
            are the request's first cells. Its own tokens, which `cache_seqlens` counts, begin at the next page.
        encoder_out_cache_loc: int64 ``[T_e]``, slots of encoders' tokens that this step stores; negative: not stored.
        encoder_lens_cpu: As `cache_seqlens_cpu`.
        token_to_kv_pool: The cache. None for an encoder.
        attn_backend: The backend that serves this step.
        tbo_children: The halves of the step, once `TboAttnBackend` has made them.
        actual_forward_mode: Of the batch of a graph: the mode of the step that is replayed. It is IDLE where a rank
            without requests replays the graph that others do: all rows are padding, and nothing is stored. None: as
            `forward_mode`.
    """

    forward_mode: ForwardMode
    req_pool_indices: Tensor
    cache_seqlens: Tensor
    num_tokens: int
    req_to_token: Tensor | None = None
    out_cache_loc: Tensor | None = None
    tokens_per_request: int = 0
    draft_steps: int = 0
    draft_step: int | None = None
    extend_seq_lens: Tensor | None = None
    max_seqlen_q: int = 0
    max_cache_seqlen: int | None = None
    max_prefix_tokens: int | None = None
    cache_seqlens_cpu: Tensor | None = None
    extend_seq_lens_cpu: Tensor | None = None
    positions: Tensor | None = None
    tree_mask: Tensor | None = None
    multi_item: MultiItemScoringParams | None = None
    encoder_lens: Tensor | None = None
    encoder_out_cache_loc: Tensor | None = None
    encoder_lens_cpu: Tensor | None = None
    token_to_kv_pool: TokenPool | None = None
    attn_backend: StepBackend | None = None
    tbo_children: tuple[AttentionBatch, AttentionBatch] | None = None
    actual_forward_mode: ForwardMode | None = None

    def __post_init__(self) -> None:
        mode = self.forward_mode
        if self.draft_steps:
            _require(self.draft_steps > 0, f"draft_steps must not be negative, got {self.draft_steps}")
            _require(mode is ForwardMode.DECODE, f"draft_steps belong to DECODE, the batch is {mode.name}")
            _require(self.tree_mask is not None, "a batch with draft_steps needs a tree_mask")
            self.tokens_per_request = self.tokens_per_request or 1
        elif mode is ForwardMode.DECODE:
            _require(
                self.tokens_per_request in (0, 1),
                f"tokens_per_request of a DECODE batch is 1, got {self.tokens_per_request}: several are TARGET_VERIFY, "
                "or branches of a draft loop, with draft_steps",
            )
            self.tokens_per_request = 1
        _require(
            self.draft_step is None or 0 <= self.draft_step < self.draft_steps,
            f"draft_step must be below draft_steps {self.draft_steps} and not negative, got {self.draft_step}",
        )
        _require(
            self.actual_forward_mode in (None, mode, ForwardMode.IDLE),
            f"actual_forward_mode of a {mode.name} batch must be {mode.name} or IDLE, got {self.actual_forward_mode!r}",
        )
        if not self.max_seqlen_q:
            self.max_seqlen_q = self.tokens_per_request or self.num_tokens
        size = self.batch_size
        _require_tensor("cache_seqlens", self.cache_seqlens, (size,), (torch.int32,))
        _require_tensor("req_pool_indices", self.req_pool_indices, (size,), (torch.int32, torch.int64))
        if self.out_cache_loc is not None:
            dtypes = (torch.int32, torch.int64)
            _require_tensor("out_cache_loc", self.out_cache_loc, (self.num_tokens,), dtypes)
        if self.positions is not None:
            got = tuple(self.positions.shape)
            _require(got[-1:] == (self.num_tokens,), f"positions must have {self.num_tokens} columns, got shape {got}")
        _require(self.num_tokens >= 0, f"num_tokens must not be negative, got {self.num_tokens}")
        if not self.is_uniform and not mode.is_idle():
            _require(
                self.max_seqlen_q * size >= self.num_tokens,
                f"max_seqlen_q is {self.max_seqlen_q}: {size} requests of at most so many new tokens have no "
                f"{self.num_tokens} (num_tokens)",
            )
        if self.max_cache_seqlen is not None and size:
            least = self.tokens_per_request or -(-self.num_tokens // size)
            _require(
                self.max_cache_seqlen >= least,
                f"max_cache_seqlen is {self.max_cache_seqlen}, below the {least} new tokens of a request: "
                "cache_seqlens and its bound count the new tokens, too",
            )
        if self.multi_item is not None:
            _require(mode is ForwardMode.EXTEND, f"multi_item belongs to EXTEND, the batch is {mode.name}")
            prompts = self.multi_item.prefix_len_ptr.numel()
            _require(prompts == size, f"prefix_len_ptr must have {size} elements (batch_size), got {prompts}")
        if self.encoder_lens is not None:
            _require_tensor("encoder_lens", self.encoder_lens, (size,), (torch.int32,))
        if self.encoder_out_cache_loc is not None:
            got = tuple(self.encoder_out_cache_loc.shape)
            _require(len(got) == 1, f"encoder_out_cache_loc must have one dimension, got shape {got}")
        for name in ("cache_seqlens_cpu", "extend_seq_lens_cpu", "encoder_lens_cpu"):
            lengths = getattr(self, name)
            if lengths is not None:
                _require_tensor(name, lengths, (size,), (torch.int32,))
                _require(lengths.device.type == "cpu", f"{name} must be on the CPU, got {lengths.device}")
        if self.extend_seq_lens is not None:
            _require_tensor("extend_seq_lens", self.extend_seq_lens, (size,), (torch.int32,))
        if self.is_uniform:
            _require(
                self.num_tokens == size * self.tokens_per_request,
                f"num_tokens must be batch_size * tokens_per_request = {size} * {self.tokens_per_request}, "
                f"got {self.num_tokens}",
            )
        else:
            _require(
                self.extend_seq_lens is not None or mode.is_idle(),
                f"a ragged {mode.name} batch needs extend_seq_lens",
            )
        if self.tree_mask is not None:
            _require(
                mode.is_target_verify() or self.draft_steps > 0,
                f"tree_mask belongs to TARGET_VERIFY or a draft step, the batch is {mode.name} without draft_steps",
            )
            shape = (size, self.tokens_per_request, -(-(self.tree_keys or self.tokens_per_request) // 8))
            _require_tensor("tree_mask", self.tree_mask, shape, (torch.uint8,))

    @property
    def batch_size(self) -> int:
        return self.req_pool_indices.shape[0]

    @property
    def tree_keys(self) -> int:
        """Tokens that `tree_mask` is over, as the decode ops take it; 0: the new ones."""
        return self.tokens_per_request * self.draft_steps

    @property
    def device(self) -> torch.device:
        return self.cache_seqlens.device

    @property
    def is_uniform(self) -> bool:
        """Every request brings the same number of tokens, known on the host."""
        return self.tokens_per_request > 0


def device_of(device: torch.device | str) -> torch.device:
    """A device as its tensors name it: "cuda" is the current CUDA device, "cuda:0" or another."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_range(owner: str, name: str, value: int, low: int, high: int = (1 << 31) - 1) -> None:
    """Raises for a number out of its range: before memory of that size is asked for."""
    if type(value) is int and low <= value <= high:
        return
    if not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__} {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{owner}: {name} must be in [{low}, {high}], got {value}")


def check_dtype(owner: str, name: str, dtype: torch.dtype) -> None:
    """Raises for what is no dtype. torch takes None for its default, whatever the other buffers have."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{owner}: {name} must be a torch.dtype, got {type(dtype).__name__} {dtype!r}")


def v_head_dim_of(owner: str, head_dim: int, v_head_dim: int) -> int:
    """`v_head_dim` as it is given to layers, pools and specs, where -1 is `head_dim`."""
    check_range(owner, "v_head_dim", v_head_dim, -1)
    if v_head_dim == 0:
        raise ValueError(f"{owner}: v_head_dim must be positive, or -1 for that of head_dim, got 0")
    return head_dim if v_head_dim == -1 else v_head_dim


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_int(name: str, value: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")


def _require_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    _require(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    names = " or ".join(str(dtype) for dtype in dtypes)
    _require(tensor.dtype in dtypes, f"{name} must be {names}, got {tensor.dtype}")
