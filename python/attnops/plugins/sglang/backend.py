"""SGLang's attention backend "attnops": an adapter that holds one of ours.

Three methods to three methods: a `ForwardBatch` becomes an `AttentionBatch` over static tensors. Device work in the
in-graph half fills them, so a captured step serves any lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from attnops import ops
from attnops.backends import HybridAttnBackend, detect_machine, get_backend_class, select
from attnops.backends.select import SLOW
from attnops.layers import RadixAttention
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.plugins.sglang.views import MLAPoolView, layer_view, pool_view
from attnops.types import MLA_KV_LORA_RANK, MLA_ROPE_DIM, AttentionBatch, AttentionSpec, ForwardMode, Limits

# By the names of SGLang's modes: their numbers change between versions.
MODES = {
    "EXTEND": ForwardMode.EXTEND,
    "DECODE": ForwardMode.DECODE,
    "MIXED": ForwardMode.MIXED,
    "IDLE": ForwardMode.IDLE,
    "TARGET_VERIFY": ForwardMode.TARGET_VERIFY,
    "DRAFT_EXTEND_V2": ForwardMode.DRAFT_EXTEND,
}


def build(spec: AttentionSpec, limits: Limits, device: torch.device) -> Any:
    """What serves a model here. Plain PyTorch, attnops' last resort, is not what who asks for attnops means."""
    selection = select(spec, detect_machine(device), speculative=limits.max_tokens_per_request > 1)
    if selection.decode == SLOW:
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in selection.rejected.items())
        raise NotImplementedError(f"attnops: no kernel serves this model in SGLang's backend attnops: {reasons}")
    decode = get_backend_class(selection.decode)(spec, limits, device)
    if not selection.is_hybrid or selection.prefill == SLOW:
        return decode
    prefill = get_backend_class(selection.prefill)(spec, limits, device)
    return HybridAttnBackend(prefill, decode, selection.speculative_attention_mode)


class AttnopsAttnBackend(AttentionBackend):
    """Serves a model runner's layers.

    Raises:
        NotImplementedError: naming what of the model is not served.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self._tokens = runner.req_to_token_pool.req_to_token
        self._pool = pool_view(runner.token_to_kv_pool, runner.page_size, runner.use_mla_backend)
        self._spec, self._limits = self._spec_of(runner), self._limits_of(runner)
        device = torch.device(runner.device)
        self._backend = self._make_backend(device)
        size = self._limits.max_batch_size
        self._cache_seqlens = torch.ones(size, dtype=torch.int32, device=device)
        self._extend_seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._trees: dict[int, Tensor] = {}
        self._layers: dict[Any, RadixAttention] = {}
        self._batch: AttentionBatch | None = None
        self._step: Any = None
        self._expanded: tuple[Tensor, FmhaPlan] | None = None  # of a step's MLA prompts

    def _make_backend(self, device: torch.device) -> Any:
        return build(self._spec, self._limits, device)

    def _spec_of(self, runner: Any) -> AttentionSpec:
        model, pool = runner.model_config, self._pool
        options: dict[str, Any] = {
            "dtype": runner.dtype,
            "kv_dtype": pool.dtype,
            "page_size": runner.page_size,
            "deterministic": bool(runner.server_args.enable_deterministic_inference),
        }
        heads = model.get_num_attention_heads(runner.server_args.tp_size)
        if isinstance(pool, MLAPoolView):
            return AttentionSpec.mla(heads, **options)
        window = getattr(runner, "sliding_window_size", None)
        return AttentionSpec(
            num_q_heads=heads,
            num_kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            sliding_window_size=-1 if window is None else window,
            **options,
        )

    def _limits_of(self, runner: Any) -> Limits:
        arguments, rows = runner.server_args, self._tokens.shape[0]
        drafts = get_spec().speculative_num_draft_tokens or 0
        most = max(getattr(arguments, name, 0) or 0 for name in ("chunked_prefill_size", "max_prefill_tokens"))
        return Limits(
            max_batch_size=rows,
            max_seqlen=self._tokens.shape[1],
            max_num_tokens=min(max(most, self._tokens.shape[1]), max(self._pool.size, rows)),
            max_tokens_per_request=max(drafts, 1),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self._backend.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The batch as attnops has it: views of static tensors."""
        fb, mode = forward_batch, MODES.get(forward_batch.forward_mode.name)
        if mode is None:
            raise NotImplementedError(f"attnops: the SGLang backend serves no {forward_batch.forward_mode.name} batch")
        served = getattr(self._backend, "capability", None)
        if served is not None and mode not in served.modes:
            raise NotImplementedError(
                f"attnops: no kernel serves {mode.name} here; --prefill-attention-backend names another backend for it"
            )
        size, tokens, uniform = fb.batch_size, fb.input_ids.shape[0], 0
        if mode is ForwardMode.DECODE:
            tokens, uniform = size, 1
        elif mode is ForwardMode.TARGET_VERIFY:
            uniform = fb.spec_info.draft_token_num
            tokens = size * uniform
        elif mode is ForwardMode.IDLE:
            tokens = 0
        elif getattr(fb, "extend_num_tokens", None) is not None:
            tokens = fb.extend_num_tokens
        self._step, self._expanded = fb, None
        self._batch = AttentionBatch(
            forward_mode=mode,
            req_pool_indices=fb.req_pool_indices[:size],
            cache_seqlens=self._cache_seqlens[:size],
            num_tokens=tokens,
            req_to_token=self._tokens,
            out_cache_loc=None if fb.out_cache_loc is None else fb.out_cache_loc[:tokens],
            tokens_per_request=uniform,
            extend_seq_lens=None if uniform else self._extend_seq_lens[:size],
            tree_mask=self._tree_mask(fb) if mode is ForwardMode.TARGET_VERIFY else None,
            token_to_kv_pool=self._pool,
        )
        self._backend.init_forward_metadata_out_graph(self._batch, in_capture)

    def _tree_mask(self, forward_batch: Any) -> Tensor | None:
        """Where `_build_tree_mask` writes; None where drafts have no branches: causal says it all."""
        spec, size = forward_batch.spec_info, forward_batch.batch_size
        if getattr(spec, "topk", 1) in (None, 0, 1) or spec.custom_mask is None:
            return None
        width = spec.draft_token_num
        if width not in self._trees:
            shape = (self._limits.max_batch_size, width, -(-width // 8))
            self._trees[width] = torch.zeros(shape, dtype=torch.uint8, device=self._cache_seqlens.device)
        return self._trees[width][:size]

    def _build_tree_mask(self, batch: AttentionBatch, custom_mask: Tensor) -> None:
        """SGLang's mask has a bool per key of each draft token, request by request; attnops' a bit per draft token."""
        assert batch.tree_mask is not None
        width, lens = batch.tokens_per_request, batch.cache_seqlens.long()
        draft = torch.arange(width, device=lens.device)
        first = (width * lens).cumsum(0) - width * lens
        row = first[:, None] + draft * lens[:, None]
        bits = custom_mask[row[:, :, None] + (lens[:, None] - width + draft)[:, None]]
        padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -width % 8)).unflatten(2, (-1, 8))
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=lens.device)
        batch.tree_mask.copy_((padded * weights).sum(dim=3, dtype=torch.uint8))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lengths, page tables, plans: device work."""
        self._current(forward_batch)
        self.plan_step(forward_batch)

    def plan_step(self, forward_batch: Any) -> None:
        """The device work of the step that was set up last, with a batch's lengths."""
        batch, fb = self._batch, forward_batch
        assert batch is not None
        if batch.num_tokens == 0:
            return
        batch.cache_seqlens.copy_(self._lengths(fb, batch.batch_size))
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            batch.cache_seqlens.add_(batch.tokens_per_request)
        if batch.extend_seq_lens is not None:
            batch.extend_seq_lens.copy_(fb.extend_seq_lens[: batch.batch_size])
        if batch.tree_mask is not None:
            self._build_tree_mask(batch, fb.spec_info.custom_mask)
        self._backend.init_forward_metadata_in_graph(batch)

    def _lengths(self, forward_batch: Any, size: int) -> Tensor:
        lens: Tensor = forward_batch.seq_lens[:size]
        return lens

    def _current(self, forward_batch: Any) -> AttentionBatch:
        """The step that was planned. SGLang's graph runners plan a view of the batch that its layers then get."""
        batch, fb = self._batch, forward_batch
        if batch is not None and (
            self._step is fb
            or (batch.batch_size == fb.batch_size and batch.forward_mode is MODES.get(fb.forward_mode.name))
        ):
            return batch
        raise RuntimeError("attnops: init_forward_metadata must run for a batch before its layers")

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """One layer; rows of q behind the step's tokens are padding and give zeros."""
        if unknown:
            asked = sorted(name for name, value in unknown.items() if value is not None and value is not False)
            if asked:
                raise NotImplementedError(f"attnops: the SGLang backend does not take {', '.join(asked)}")
        batch = self._current(forward_batch)
        tokens = batch.num_tokens
        out = written = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if q.shape[0] > tokens:  # every slice costs the host a microsecond
            out[tokens:].zero_()
            q, written = q[:tokens], out[:tokens]
            k, v, q_rope, k_rope = (None if t is None else t[:tokens] for t in (k, v, q_rope, k_rope))
        if isinstance(self._pool, MLAPoolView) and layer.qk_head_dim != MLA_KV_LORA_RANK + MLA_ROPE_DIM:
            self._attend_expanded(q, k, v, layer, batch, written)
            return out
        ours = self._layer(layer, sinks)
        self._backend.forward(q, k, v, ours, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=written)
        return out

    def _attend_expanded(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: AttentionBatch, out: Tensor
    ) -> None:
        """Prompts of an MLA model, none of which has anything in the cache. Keys and values are made for each head, and
        SGLang has stored the latents.
        """
        if k is None or v is None or batch.extend_seq_lens is None:
            mode = batch.forward_mode.name
            raise NotImplementedError(f"attnops: the SGLang backend serves no MLA layer unabsorbed in a {mode} batch")
        heads, dims = layer.tp_q_head_num, (layer.qk_head_dim, layer.v_head_dim)
        if self._expanded is None:
            bounds = ops.build_cu_seqlens(batch.extend_seq_lens)
            plan = FmhaPlan.allocate(
                batch.num_tokens,
                batch.batch_size,
                causal=True,
                window_left=-1,
                num_q_heads=heads,
                num_kv_heads=heads,
                head_dim=max(dims),
                device=q.device,
            )
            ops.fmha_plan(plan, bounds)
            self._expanded = bounds, plan
        bounds, plan = self._expanded
        rows = [x.view(-1, heads, dim) for x, dim in ((q, dims[0]), (k, dims[0]), (v, dims[1]), (out, dims[1]))]
        options: dict[str, Any] = {"softmax_scale": layer.scaling, "logit_cap": layer.logit_cap, "out": rows[3]}
        ops.fmha_varlen(rows[0], rows[1], rows[2], bounds, bounds, plan, **options)

    def forward_decode(self, *args: Any, **options: Any) -> Tensor:
        return self.forward(*args, **options)

    forward_extend = forward_decode

    def _layer(self, layer: Any, sinks: Tensor | None) -> RadixAttention:
        ours = self._layers.get(layer)
        if ours is None or (sinks is not None and ours.sinks is None):
            ours = self._layers[layer] = layer_view(layer, sinks)
        elif sinks is not None and ours.sinks is not None and ours.sinks is not sinks:
            ours.sinks = sinks.float()
        return ours
