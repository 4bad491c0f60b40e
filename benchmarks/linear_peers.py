"""Peers of `bench_linear.py`: SGLang's Triton kernels and FLA's, by their public functions, where they are found.

FlashInfer's gated delta rule is a peer by request. Its kernels are compiled at their first call, some for each extent.
So are mamba_ssm's kernels in Triton, causal-conv1d, FlashKDA and cuDNN's KDA. What is requested has to be there.

Each function gives calls by the peer's name, or nothing where the peer has no such kernel. What a peer's step needs
besides its main kernel, as gates, is in its call. A call knows how to read what it computed, so that it is compared
with attnops before it is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from linear_peer_imports import REQUESTED, SGLANG, StandIns, imported, started
from torch import Tensor

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class PeerCall:
    """A call of a peer.

    read: from what the call returned, the output and the states after it, in the order of `state_indices`, or None.
    key_first: the peer keeps its states ``[K, V]``, where attnops has ``[V, K]``.
    """

    call: Callable[[], object]
    read: Callable[[Any], tuple[Tensor, Tensor | None]]
    key_first: bool = False

    def __call__(self) -> object:
        with torch.no_grad():
            return self.call()


def quick_tuning() -> None:
    """Tune Triton's kernels in 25 ms a variant, not in 125: there are hundreds."""
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    def bench(call: Callable[[], object], quantiles: tuple[float, ...]) -> object:
        return testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)

    Autotuner.do_bench = property(lambda _: bench)


class Peers:
    """What is found of SGLang and FLA, with `flashinfer` of FlashInfer, and what `also` requests."""

    # Of what may be requested.
    mamba_step = mamba_scan = conv1d = conv1d_step = flash_kda = cudnn_kda = None

    def __init__(self, flashinfer: bool = False, also: Sequence[str] = ()) -> None:
        self._bounds = self._wide = torch.empty(0)
        for request in also:
            vars(self).update(started(request))
        found = importlib.util.find_spec("sglang")
        if found and found.submodule_search_locations:
            sys.meta_path.insert(0, StandIns(Path(next(iter(found.submodule_search_locations)))))  # type: ignore[arg-type]
        fla, linear, mamba = (f"{SGLANG}.{name}" for name in ("attention.fla", "attention.linear", "mamba.triton_ops"))
        both = bool(found)
        self.packed = both and imported(f"{fla}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode")
        self.sglang_gdn = both and imported(f"{fla}.chunk", "chunk_gated_delta_rule")
        self.gating = both and imported(f"{linear}.fused_gdn_gating", "fused_gdn_gating")
        self.sglang_kda = both and imported(f"{fla}.kda", "chunk_kda")
        self.update = both and imported(
            f"{linear}.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"
        )
        self.seg_la = both and imported(f"{linear}.seg_la", "seg_la_fwd")
        self.seg_la_meta = both and imported(f"{linear}.seg_la", "SegLaMeta")
        self.ssm_step = both and imported(f"{mamba}.mamba_ssm", "selective_state_update")
        self.ssm_scan = both and imported(f"{mamba}.ssd_combined", "mamba_chunk_scan_combined")
        conv = f"{SGLANG}.mamba.causal_conv1d_triton"
        self.sglang_conv = both and imported(conv, "causal_conv1d_fn")
        self.sglang_conv_step = both and imported(conv, "causal_conv1d_update")
        some = importlib.util.find_spec("fla") is not None
        self.fla_gdn = some and imported("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
        self.fla_gdn_step = some and imported("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
        self.fla_kda = some and imported("fla.ops.kda", "chunk_kda")
        self.fla_gla = some and imported("fla.ops.simple_gla", "chunk_simple_gla")
        self.fla_gla_step = some and imported("fla.ops.simple_gla", "fused_recurrent_simple_gla")
        self.fla_kda_step = some and imported("fla.ops.kda", "fused_recurrent_kda")
        self.fla_conv = some and imported("fla.modules.causal_conv1d", "causal_conv1d")
        self.fla_conv_step = some and imported("fla.modules.causal_conv1d", "causal_conv1d_update")
        norm = flashinfer and both and imported(f"{fla}.l2norm", "l2norm_fwd")
        self.norm = norm or (flashinfer and some and imported("fla.modules.l2norm", "l2norm_fwd"))
        self.flashinfer_gdn = flashinfer and imported("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
        self.flashinfer_step = flashinfer and imported("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
        self.flashinfer_drafts = flashinfer and imported("flashinfer.gdn_decode", "gated_delta_rule_mtp")

    @staticmethod
    def version(peer: str) -> str:
        if peer.startswith("attnops"):
            return ""
        named = {"SGLang": "sglang", "transformers": "transformers", "FlashInfer": "flashinfer-python"}
        named |= {name: package for name, package, _ in REQUESTED.values()}
        for name in (next((named[begin] for begin in named if peer.startswith(begin)), "fla-core"),):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return ""

    def _long(self, bounds: Tensor) -> Tensor:
        """The same tensor for the same bounds: the peers remember what they made of it, and a graph asks for that."""
        if self._bounds is not bounds:
            self._bounds, self._wide = bounds, bounds.long()
        return self._wide

    def delta_step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
                   states: Tensor, slots: Tensor) -> Calls:  # fmt: skip
        """A token of each request, states in a pool (SGLang) or apart (FLA)."""
        calls: Calls = {}
        scale, channels, pool = k.shape[-1] ** -0.5, a.dim() == 3, partial(_slots, states, slots)
        if self.packed and not channels:
            mixed = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
            out = v.new_empty(v.shape[0], 1, *v.shape[1:])
            call = partial(self.packed, mixed, a, b, A_log, bias, scale, states, out, slots, True)
            calls["SGLang packed"] = PeerCall(call, lambda found: (found[0], pool()))
        if self.update:
            row = lambda t: t.unsqueeze(0)  # noqa: E731
            bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            call = partial(
                self.update, A_log, a.flatten(1), bias.flatten(), 1.0, 20.0, row(q), row(k), row(v), b, states, slots,
                use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, is_kda=channels,
            )  # fmt: skip
            calls["SGLang"] = PeerCall(call, lambda found: (found, pool()))
        if self.flashinfer_step and not channels and q.shape[-1] == v.shape[-1] == 128:
            own, rows = v.new_empty(len(v), 1, *v.shape[1:]), [t.unsqueeze(1) for t in (q, k, v, a, b)]
            call = partial(
                self.flashinfer_step, *rows[:3], None, A_log, rows[3], bias, rows[4], scale, own, True, states, slots
            )
            calls["FlashInfer"] = PeerCall(call, lambda found: (found[0], pool()))
        step = self.fla_kda_step if channels else self.fla_gdn_step
        if step:
            call = partial(
                step, *(t.unsqueeze(1) for t in (q, k, v, a)), beta=b.unsqueeze(1), initial_state=pool(),
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
                dt_bias=bias.flatten(), use_beta_sigmoid_in_kernel=True, state_v_first=True,
            )  # fmt: skip
            calls["FLA"] = PeerCall(call, lambda found: found)
        return calls

    def conv_delta_step(self, x: Tensor, weight: Tensor, conv_states: Tensor, heads: tuple[int, int, int, int],
                        a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor, states: Tensor,
                        slots: Tensor) -> Calls:  # fmt: skip
        """A convolution, then a token of each request of what it gave. heads: of keys, of values; their dims."""
        calls: Calls = {}
        of_keys, of_values, keys, values = heads
        channels, scale, pool = a.dim() == 3, keys**-0.5, partial(_slots, states, slots)
        widths = [of_keys * keys, of_keys * keys, of_values * values]
        bounds = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
        if self.sglang_conv_step and self.packed and self.update:
            convolve, packed, update = self.sglang_conv_step, self.packed, self.update
            out = x.new_empty(len(x), 1, of_values, values)

            def sglang() -> object:
                mixed: Any = convolve(x, conv_states, weight, None, "silu", conv_state_indices=slots)
                if not channels:
                    return packed(mixed, a, b, A_log, bias, scale, states, out, slots, True)
                q, k, v = (t.unflatten(1, (-1, d))[None] for t, d in zip(mixed.split(widths, 1), (keys, keys, values)))
                options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds, "is_kda": True}
                return update(A_log, a.flatten(1), bias.flatten(), 1.0, 20.0, q, k, v, b, states, slots, **options)

            calls["SGLang"] = PeerCall(sglang, lambda found: (found if channels else found[0], pool()))
        step = self.fla_kda_step if channels else self.fla_gdn_step
        if self.fla_conv_step and step:
            first = self.fla_conv_step
            cache = torch.nn.functional.pad(_slots(conv_states, slots), (1, 0))
            gates = {"A_log": A_log, "dt_bias": bias.flatten(), "use_beta_sigmoid_in_kernel": True}
            gates |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
            states_then = {"initial_state": pool(), "output_final_state": True, "state_v_first": True}

            def fla() -> object:
                mixed: Any = first(x, cache, weight=weight, activation="silu")
                mixed = mixed[0] if isinstance(mixed, tuple) else mixed
                q, k, v = (
                    t.unflatten(1, (-1, d))[:, None] for t, d in zip(mixed.split(widths, 1), (keys, keys, values))
                )
                return step(q, k, v, a[:, None], beta=b[:, None], **gates, **states_then)

            calls["FLA"] = PeerCall(fla, lambda found: found)
        return calls

    def convolution(self, x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, bounds: Tensor | None,
                    lengths: list[int]) -> Calls:  # fmt: skip
        """Of prompts, or without `bounds` of a token of each request. FLA's state has a column more."""
        calls: Calls = {}
        if bounds is not None:
            if self.sglang_conv:
                some = torch.ones(len(slots), dtype=torch.bool, device=x.device)
                call = partial(self.sglang_conv, x.T, weight, None, states, bounds, lengths, slots, some, "silu")
                calls["SGLang"] = PeerCall(call, lambda found: (found.T, _slots(states, slots)))
            if self.fla_conv:
                before = torch.nn.functional.pad(_slots(states, slots), (1, 0))
                call = partial(self.fla_conv, x[None], weight, activation="silu", initial_state=before,
                               output_final_state=True, cu_seqlens=self._long(bounds))  # fmt: skip
                calls["FLA"] = PeerCall(call, lambda found: (found[0], found[1][..., 1:]))
            if self.conv1d and len(set(lengths)) == 1:  # with states it takes a batch, channels dense
                rows = x.unflatten(0, (len(slots), -1)).mT
                start, end = (_slots(states, slots).mT.contiguous().mT for _ in range(2))
                call = partial(self.conv1d, rows, weight, initial_states=start, return_final_states=True,
                               final_states_out=end, activation="silu")  # fmt: skip
                calls["causal-conv1d"] = PeerCall(call, lambda found: (found[0].mT.reshape(x.shape), found[1]))
            return calls
        if self.sglang_conv_step:
            call = partial(self.sglang_conv_step, x, states, weight, None, "silu", conv_state_indices=slots)
            calls["SGLang"] = PeerCall(call, lambda found: (found, _slots(states, slots)))
        if self.fla_conv_step:
            cache = torch.nn.functional.pad(_slots(states, slots), (1, 0))
            call = partial(self.fla_conv_step, x, cache, weight=weight, activation="silu")
            calls["FLA"] = PeerCall(call, lambda found: (found[0] if isinstance(found, tuple) else found,
                                                         cache[..., 1:]))  # fmt: skip
        if self.conv1d_step:
            call = partial(self.conv1d_step, x, states, weight, None, "silu", conv_state_indices=slots)
            calls["causal-conv1d"] = PeerCall(call, lambda found: (found, _slots(states, slots)))
        return calls

    def delta_prompts(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
                      states: Tensor, slots: Tensor, bounds: Tensor, lower_bound: float = 0.0) -> Calls:  # fmt: skip
        """Prompts from the states of the pool (SGLang), or of float32 apart (FLA).

        FlashKDA and cuDNN take gates above a bound alone, and FLA these as well.
        """
        if lower_bound:
            return self._bounded_prompts(q, k, v, a, b, A_log, bias, states, slots, bounds, lower_bound)
        calls: Calls = {}
        channels, row, pool = a.dim() == 3, lambda t: t.unsqueeze(0), partial(_slots, states, slots)
        wide, tokens = self._long(bounds), [row(t) for t in (q, k, v)]
        before = torch.zeros(states.shape, device=q.device)
        if channels and self.sglang_kda:
            own = v.clone()  # the output is written over it
            call = partial(
                self.sglang_kda, *tokens[:2], row(own), row(a), row(b), initial_state=states,
                initial_state_indices=slots, use_qk_l2norm_in_kernel=True, cu_seqlens=wide, A_log=A_log,
                dt_bias=bias.flatten(), beta_is_raw=True,
            )  # fmt: skip
            calls["SGLang"] = PeerCall(call, lambda found: (found, pool()))
        if channels and self.fla_kda:
            call = partial(
                self.fla_kda, *tokens, row(a), row(b), initial_state=before, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=A_log,
                dt_bias=bias.flatten(), state_v_first=True, cu_seqlens=wide,
            )  # fmt: skip
            calls["FLA"] = PeerCall(call, lambda found: found[:2])
        if not channels and self.flashinfer_gdn and self.norm and self.gating and q.shape[-1] == v.shape[-1] == 128:
            prompts, norm, made, result = self.flashinfer_gdn, self.norm, self.gating, torch.empty_like(v)
            longest = int(bounds.diff().max())  # it bounds the grids, as a server would

            def flashinfer() -> object:
                g, beta = made(A_log, a, b, bias)  # type: ignore[misc]
                unit = [t[0] if isinstance(t, tuple) else t for t in (norm(q), norm(k))]
                return prompts(*unit, v, g[0].exp(), beta[0].float(), output_final_state=True, cu_seqlens=wide,
                               output=result, output_state=states, state_indices=slots, max_seqlen=longest)  # fmt: skip

            calls["FlashInfer"] = PeerCall(flashinfer, lambda _: (result, pool()))
        if not channels and self.sglang_gdn and self.gating:
            gdn, gating = self.sglang_gdn, self.gating

            def sglang() -> object:
                g, beta = gating(A_log, a, b, bias)  # type: ignore[misc]
                return gdn(*tokens, g, beta, initial_state=states, initial_state_indices=slots, cu_seqlens=wide,
                           use_qk_l2norm_in_kernel=True)  # fmt: skip

            calls["SGLang"] = PeerCall(sglang, lambda found: (found[0], pool()))
        if not channels and self.fla_gdn:
            call = partial(
                self.fla_gdn, *tokens, row(a), row(b), initial_state=before, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=A_log,
                dt_bias=bias, state_v_first=True, cu_seqlens=wide,
            )  # fmt: skip
            calls["FLA"] = PeerCall(call, lambda found: found[:2])
        return calls

    def _bounded_prompts(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
                         states: Tensor, slots: Tensor, bounds: Tensor, lower_bound: float) -> Calls:  # fmt: skip
        """Of KDA: each gate is above `lower_bound`. States of float32 apart."""
        calls: Calls = {}
        if a.dim() != 3 or q.shape[1:] != v.shape[1:]:
            return calls
        wide, row, before = self._long(bounds), lambda t: t.unsqueeze(0), torch.zeros(states.shape, device=q.device)
        tokens = [row(t) for t in (q, k, v, a, b)]
        if self.fla_kda:
            call = partial(
                self.fla_kda, *tokens, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=lower_bound,
                A_log=A_log, dt_bias=bias.flatten(), state_v_first=True, cu_seqlens=wide,
            )  # fmt: skip
            calls["FLA"] = PeerCall(call, lambda found: found[:2])
        if self.flash_kda and q.shape[-1] == 128:
            out, after = torch.empty_like(tokens[2]), torch.empty_like(before)
            call = partial(self.flash_kda, *tokens, q.shape[-1] ** -0.5, out, A_log, bias, lower_bound,
                           initial_state=before, final_state=after, cu_seqlens=wide)  # fmt: skip
            calls["FlashKDA"] = PeerCall(call, lambda _: (out, after))
        if self.cudnn_kda and q.shape[-1] == 128:
            call = partial(
                self.cudnn_kda, q, k, v, a, b, bounds, initial_state=before, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
                gate_lower_bound=lower_bound, a_log=A_log, dt_bias=bias,
            )  # fmt: skip
            calls["cuDNN"] = PeerCall(call, lambda found: found)
        return calls

    def ssd_step(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: Tensor, slots: Tensor) -> Calls:
        """With a D of zeros, since neither call takes None."""
        calls: Calls = {}
        rate = A[:, None, None].expand(-1, *states.shape[2:])
        out, wide = torch.empty_like(x), dt.unsqueeze(-1).expand_as(x)
        bias = torch.zeros_like(A)[:, None].expand(-1, x.shape[-1])
        if self.mamba_step:
            call = partial(self.mamba_step, states, x, wide, rate, B, C, D=bias, dt_bias=bias, dt_softplus=True,
                           state_batch_indices=slots)  # fmt: skip
            calls["mamba_ssm"] = PeerCall(call, lambda found: (found, _slots(states, slots)))
        if not self.ssm_step:
            return calls
        call = partial(
            self.ssm_step, states, x, wide, rate, B, C, D=bias, dt_bias=bias, dt_softplus=True,
            state_batch_indices=slots, out=out,
        )  # fmt: skip
        return calls | {"SGLang": PeerCall(call, lambda _: (out, _slots(states, slots)))}

    def ssd_prompts(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: Tensor, slots: Tensor,
                    bounds: Tensor, lengths: list[int]) -> Calls:  # fmt: skip
        """The scans of SGLang and mamba_ssm.

        Prompts side by side, with the states put into the pool; and those of one length as a batch.
        """
        calls: Calls = {}
        bias, wide, batch, kept = torch.zeros_like(A), slots.long(), len(lengths), states.dtype
        of_batch = torch.arange(batch, dtype=torch.int32, device=x.device)
        owners = of_batch.repeat_interleave(bounds.diff().long())[None]
        fold = lambda t: t.unflatten(0, (batch, -1))  # noqa: E731
        if self.mamba_scan:
            own, given = self.mamba_scan, {"dt_bias": bias, "dt_softplus": True}
            if len(set(lengths)) == 1:
                call = partial(own, fold(x), fold(dt), A, fold(B), fold(C), 256, return_final_states=True, **given)
                calls["mamba_ssm batch"] = PeerCall(call, lambda found: found)

            def side_by_side() -> Tensor:
                rows, last = own(x[None], dt[None], A, B[None], C[None], 256, seq_idx=owners, cu_seqlens=bounds,
                                 return_varlen_states=True, **given)  # fmt: skip
                states.index_copy_(0, wide, last.to(kept))
                return rows

            calls["mamba_ssm"] = PeerCall(side_by_side, lambda found: (found, _slots(states, slots)))
        if not self.ssm_scan:
            return calls
        scan, out = self.ssm_scan, torch.empty_like(x)
        options = {"dt_bias": bias, "dt_softplus": True, "state_dtype": kept}

        def ragged() -> None:
            last: Any = scan(x[None], dt[None], A, B[None], C[None], 256, out=out[None], seq_idx=owners,
                             cu_seqlens=bounds, return_varlen_states=True, **options)  # fmt: skip
            states.index_copy_(0, wide, last.to(kept))

        calls["SGLang"] = PeerCall(ragged, lambda _: (out, _slots(states, slots)))
        if len(set(lengths)) == 1:
            call = partial(scan, *(fold(t) for t in (x, dt)), A, fold(B), fold(C), 256, out=fold(out),
                           return_final_states=True, **options)  # fmt: skip
            calls["SGLang batch"] = PeerCall(call, lambda found: (out, found))
        return calls

    def lightning(self, q: Tensor, k: Tensor, v: Tensor, A: Tensor, states: Tensor, slots: Tensor, bounds: Tensor,
                  steps: bool) -> Calls:  # fmt: skip
        """SGLang's kernels take one dim for keys and values, in steps of 128 and more: smaller ones launch nothing."""
        calls: Calls = {}
        lengths, keys = bounds.diff(), q.shape[-1]
        if self.seg_la and self.seg_la_meta and keys == v.shape[-1] and keys >= (128 if steps else 64):
            meta = self.seg_la_meta(
                batch_size=len(slots), max_q_length=int(lengths.max()), q_offsets=bounds, s_offsets=slots,
                q_lengths=lengths, s_scales=torch.full_like(slots, int(steps)),
            )  # fmt: skip
            call = partial(self.seg_la, q, k, v, states, -A, meta, softmax_scale=1.0)
            calls["SGLang"] = PeerCall(call, lambda found: (found, _slots(states, slots)), key_first=True)
        gla, dim = (self.fla_gla_step, 1) if steps else (self.fla_gla, 0)
        if gla:
            tokens, options = [t.unsqueeze(dim) for t in (q, k, v)], {"scale": 1.0, "state_v_first": True}
            options |= {"initial_state": _slots(states, slots)} if steps else {"cu_seqlens": self._long(bounds)}
            call = partial(gla, *tokens, g_gamma=A, output_final_state=True, **options)
            calls["FLA"] = PeerCall(call, lambda found: found)
        return calls

    def verify(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor, kind: str,
               states: Tensor, slots: Tensor, snapshots: Tensor, parents: Tensor | None,
               accepted: int) -> Calls:  # fmt: skip
        """Drafts with a state kept for each, and the last accepted one copied. kind: of a layer, as in its name.

        FlashInfer takes chains of GDN alone.

        snapshots: ``[B, T, HV, V, K]``. parents: of each draft ``[B, T]``, None for a chain.
        """
        batch, calls = len(slots), {}
        drafts, row = len(q) // batch, lambda t: t.unsqueeze(0)
        own, wide = torch.arange(batch, dtype=torch.int32, device=q.device), slots.long()
        draft: Callable[[], object] | None
        key_first, out = False, torch.empty_like(v)
        if kind in ("GDN", "KDA") and self.update:
            draft = partial(
                self.update, A_log, a.flatten(1), bias.flatten(), 1.0, 20.0, row(q), row(k), row(v), b, states, slots,
                use_qk_l2norm_in_kernel=True, cu_seqlens=torch.arange(batch + 1, device=q.device).int() * drafts,
                is_kda=kind == "KDA", disable_state_update=True, intermediate_states_buffer=snapshots,
                intermediate_state_indices=own, cache_steps=drafts, retrieve_parent_token=parents,
            )  # fmt: skip
        elif kind == "Mamba2" and self.ssm_step:
            fold = lambda t: t.unflatten(0, (batch, drafts))  # noqa: E731
            zeros = torch.zeros_like(A_log)[:, None].expand(-1, v.shape[-1])
            draft = partial(
                self.ssm_step, states, fold(v), fold(a.unsqueeze(-1).expand_as(v)),
                (A_log - 1)[:, None, None].expand(-1, *states.shape[2:]), fold(k), fold(q),
                D=zeros, dt_bias=zeros, dt_softplus=True, state_batch_indices=slots, out=fold(out),
                disable_state_update=True, intermediate_states_buffer=snapshots, cache_steps=drafts,
                retrieve_parent_token=parents, intermediate_state_indices=own,
            )  # fmt: skip
        elif kind == "Lightning" and self.seg_la and self.seg_la_meta and parents is None and _square(q, v):
            meta = self.seg_la_meta(
                batch_size=batch, max_q_length=drafts, q_offsets=own * drafts, s_offsets=slots,
                q_lengths=torch.full_like(slots, drafts), s_scales=torch.ones_like(slots),
            )  # fmt: skip
            draft, key_first = partial(
                self.seg_la, q, k, v, states, 1 - A_log, meta, caches=snapshots, cache_indices=own, softmax_scale=1.0
            ), True  # fmt: skip
        else:
            draft = None

        def kept(call: Callable[[], object]) -> object:
            found = call()
            states.index_copy_(0, wide, snapshots[:batch, accepted - 1])
            return found

        if draft is not None:
            read = lambda found: (out if found is None else found, None)  # noqa: E731
            calls["SGLang snapshots"] = PeerCall(partial(kept, draft), read, key_first)
        halves = states.dtype == torch.bfloat16
        step = self.flashinfer_step if halves else self.flashinfer_drafts
        if step and kind == "GDN" and parents is None and q.shape[-1] == v.shape[-1] == 128:
            chain = [t.unflatten(0, (batch, drafts)) for t in (q, k, v, a, b)]
            given = {"A_log": A_log, "a": chain[3], "dt_bias": bias, "b": chain[4], "initial_state": states}
            given |= {"initial_state_indices": slots, "intermediate_states_buffer": snapshots[:batch]}
            given |= {"disable_state_update": True, **({"state": None} if halves else {})}
            call = partial(kept, partial(step, *chain[:3], **given))
            calls["FlashInfer snapshots"] = PeerCall(call, lambda found: (found[0], None))
        return calls


def _slots(pool: Tensor, slots: Tensor) -> Tensor:
    return pool[slots.long()]


def _square(q: Tensor, v: Tensor) -> bool:
    return q.shape[-1] == v.shape[-1] >= 64


def torch_chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
                batch: int) -> Calls:  # fmt: skip
    """transformers' gated delta rule in chunks of plain torch, gates included: prompts of one length."""
    path = "transformers.models.qwen3_next.modeling_qwen3_next"
    if importlib.util.find_spec("transformers") is None or len(q) % batch:
        return {}
    function = inspect.unwrap(importlib.import_module(path).torch_chunk_gated_delta_rule)
    tokens = [t.unflatten(0, (batch, -1)) for t in (q, k, v)]

    def call() -> object:
        g = -A_log.exp() * torch.nn.functional.softplus(a.float() + bias)
        gates = [t.unflatten(0, (batch, -1)) for t in (g, b.float().sigmoid())]
        return function(*tokens, *gates, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return {"transformers torch_chunk": torch.no_grad()(call)}
