"""Peers of `bench_linear.py`: SGLang's Triton kernels and FLA's, by their public functions, where they are found.

SGLang's files ask its server for settings, which stand-ins answer here. Each function gives calls by the peer's name,
or nothing where the peer has no such kernel. What a peer's step needs besides its main kernel, as gates, is in its
call.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

Calls = dict[str, Callable[[], object]]
SGLANG = "sglang.kernels.ops"


class _Settings(types.ModuleType):
    """A module that answers whatever is asked of a server that runs on CUDA without options."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "torch_release":
            return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if name == "register_custom_op":
            return lambda *args, **options: args[0] if args and callable(args[0]) else lambda function: function
        if name == "get_device_sm":
            return lambda *_: 90
        if name in ("is_cuda", "is_arch_support_pdl", "is_sm90_supported", "is_gather_supported"):
            return lambda *_: True
        if name == "cdiv":
            return lambda a, b: -(-a // b)
        if name == "next_power_of_2":
            return lambda n: 1 << (n - 1).bit_length()
        return lambda *_, **__: False


class _StandIns:
    """Finds SGLang's modules outside its kernels: none of them is run."""

    KEPT = (f"{SGLANG}.attention.fla", f"{SGLANG}.attention.linear", f"{SGLANG}.mamba.triton_ops")

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "sglang" or name.startswith(tuple(f"{kept}." for kept in self.KEPT)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Settings(spec.name)
        module.__path__ = [str(self.root / Path(*spec.name.split(".")[1:]))]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _import(name: str, function: str) -> Callable[..., object] | None:
    try:
        return getattr(importlib.import_module(name), function)
    except Exception as error:  # a peer that does not import is no peer
        print(f"{name}: not found ({type(error).__name__}: {error})")
        return None


class Peers:
    """What is found of SGLang and FLA."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("sglang")
        if found and found.submodule_search_locations:
            sys.meta_path.insert(0, _StandIns(Path(next(iter(found.submodule_search_locations)))))  # type: ignore[arg-type]
        fla, linear, mamba = (f"{SGLANG}.{name}" for name in ("attention.fla", "attention.linear", "mamba.triton_ops"))
        both = bool(found)
        self.packed = both and _import(f"{fla}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode")
        self.sglang_gdn = both and _import(f"{fla}.chunk", "chunk_gated_delta_rule")
        self.gating = both and _import(f"{linear}.fused_gdn_gating", "fused_gdn_gating")
        self.sglang_kda = both and _import(f"{fla}.kda", "chunk_kda")
        self.update = both and _import(
            f"{linear}.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"
        )
        self.seg_la = both and _import(f"{linear}.seg_la", "seg_la_fwd")
        self.seg_la_meta = both and _import(f"{linear}.seg_la", "SegLaMeta")
        self.ssm_step = both and _import(f"{mamba}.mamba_ssm", "selective_state_update")
        self.ssm_scan = both and _import(f"{mamba}.ssd_combined", "mamba_chunk_scan_combined")
        some = importlib.util.find_spec("fla") is not None
        self.fla_gdn = some and _import("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
        self.fla_gdn_step = some and _import("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
        self.fla_kda = some and _import("fla.ops.kda", "chunk_kda")
        self.fla_gla = some and _import("fla.ops.simple_gla", "chunk_simple_gla")
        self.fla_kda_step = some and _import("fla.ops.kda", "fused_recurrent_kda")
        self.fla_conv = some and _import("fla.modules.causal_conv1d", "causal_conv1d")
        self.fla_conv_step = some and _import("fla.modules.causal_conv1d", "causal_conv1d_update")

    @staticmethod
    def version(peer: str) -> str:
        if peer.startswith("attnops"):
            return ""
        named = {"SGLang": "sglang", "transformers": "transformers"}
        for name in (next((named[begin] for begin in named if peer.startswith(begin)), "fla-core"),):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return ""

    def delta_step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
                   states: Tensor, slots: Tensor) -> Calls:  # fmt: skip
        """A token of each request, states in a pool (SGLang) or apart (FLA)."""
        calls: Calls = {}
        scale, channels = k.shape[-1] ** -0.5, a.dim() == 3
        if self.packed and not channels:
            mixed = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
            out = v.new_empty(v.shape[0], 1, *v.shape[1:])
            calls["SGLang packed"] = partial(self.packed, mixed, a, b, A_log, bias, scale, states, out, slots, True)
        if self.update:
            row = lambda t: t.unsqueeze(0)  # noqa: E731
            bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
            calls["SGLang"] = partial(
                self.update, A_log, a.flatten(1), bias.flatten(), 1.0, 20.0, row(q), row(k), row(v), b, states, slots,
                use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, is_kda=channels,
            )  # fmt: skip
        step = self.fla_kda_step if channels else self.fla_gdn_step
        if step:
            own = states[: len(q)].clone()
            calls["FLA"] = partial(
                step, *(t.unsqueeze(1) for t in (q, k, v, a)), beta=b.unsqueeze(1), initial_state=own,
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log,
                dt_bias=bias.flatten(), use_beta_sigmoid_in_kernel=True, state_v_first=True,
            )  # fmt: skip
        return {name: torch.no_grad()(call) for name, call in calls.items()}

    def convolution(self, x: Tensor, weight: Tensor, states: Tensor, bounds: Tensor | None) -> Calls:
        """FLA's, of prompts, or without `bounds` of a token of each request. Its state has a column more."""
        if bounds is not None:
            if not self.fla_conv:
                return {}
            call = partial(self.fla_conv, x[None], weight, activation="silu", output_final_state=True,
                           cu_seqlens=bounds.long() if len(bounds) > 2 else None)  # fmt: skip
        else:
            if not self.fla_conv_step:
                return {}
            cache = torch.nn.functional.pad(states[: len(x)], (1, 0))
            call = partial(self.fla_conv_step, x, cache, weight=weight, activation="silu")
        return {"FLA": torch.no_grad()(call)}

    def delta_prompts(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
                      states: Tensor, bounds: Tensor) -> Calls:  # fmt: skip
        calls: Calls = {}
        channels, row = a.dim() == 3, lambda t: t.unsqueeze(0)
        wide, slots = bounds.long(), torch.arange(len(states), dtype=torch.int32, device=q.device)
        tokens = [row(t) for t in (q, k, v)]
        if channels and self.sglang_kda:
            calls["SGLang"] = partial(
                self.sglang_kda, *tokens, row(a), row(b.sigmoid()), initial_state=states, initial_state_indices=slots,
                use_qk_l2norm_in_kernel=True, cu_seqlens=wide, A_log=A_log, dt_bias=bias.flatten(),
            )  # fmt: skip
        if channels and self.fla_kda:
            calls["FLA"] = partial(
                self.fla_kda, *tokens, row(a), row(b), initial_state=states.clone(), output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=A_log,
                dt_bias=bias.flatten(), state_v_first=True, cu_seqlens=wide, disable_recompute=True,
            )  # fmt: skip
        if not channels and self.sglang_gdn and self.gating:
            gdn, gating = self.sglang_gdn, self.gating

            def sglang() -> object:
                g, beta = gating(A_log, a, b, bias)  # type: ignore[misc]
                return gdn(*tokens, g, beta, initial_state=states, initial_state_indices=slots, cu_seqlens=wide,
                           use_qk_l2norm_in_kernel=True)  # fmt: skip

            calls["SGLang"] = sglang
        if not channels and self.fla_gdn:
            calls["FLA"] = partial(
                self.fla_gdn, *tokens, row(a), row(b), initial_state=states.clone(), output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=A_log,
                dt_bias=bias, state_v_first=True, cu_seqlens=wide,
            )  # fmt: skip
        return {name: torch.no_grad()(call) for name, call in calls.items()}

    def ssd_step(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: Tensor, slots: Tensor) -> Calls:
        if not self.ssm_step:
            return {}
        rate = A[:, None, None].expand(-1, *states.shape[2:])
        out, wide = torch.empty_like(x), dt.unsqueeze(-1).expand_as(x)
        bias = torch.zeros_like(A)[:, None].expand(-1, x.shape[-1])
        return {
            "SGLang": partial(
                self.ssm_step, states, x, wide, rate, B, C, dt_bias=bias, dt_softplus=True, state_batch_indices=slots,
                out=out,
            )
        }  # fmt: skip

    def ssd_prompts(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, lengths: list[int]) -> Calls:
        """SGLang's scan of prompts of one length, as a batch."""
        if not self.ssm_scan:
            return {}
        batch, out = len(lengths), torch.empty_like(x)
        fold = lambda t: t.unflatten(0, (batch, -1))  # noqa: E731
        bias = torch.zeros_like(A)
        return {
            "SGLang": partial(
                self.ssm_scan, *(fold(t) for t in (x, dt)), A, fold(B), fold(C), 256, dt_bias=bias, dt_softplus=True,
                out=fold(out), return_final_states=True, state_dtype=torch.float32,
            )
        }  # fmt: skip

    def lightning(self, q: Tensor, k: Tensor, v: Tensor, A: Tensor, states: Tensor, slots: Tensor, bounds: Tensor,
                  steps: bool) -> Calls:  # fmt: skip
        calls: Calls = {}
        lengths = bounds.diff()
        if self.seg_la and self.seg_la_meta:
            meta = self.seg_la_meta(
                batch_size=len(slots), max_q_length=int(lengths.max()), q_offsets=bounds, s_offsets=slots,
                q_lengths=lengths, s_scales=torch.full_like(slots, int(steps)),
            )  # fmt: skip
            calls["SGLang"] = partial(self.seg_la, q, k, v, states, -A, meta)
        if self.fla_gla and not steps:
            tokens = [t.unsqueeze(0) for t in (q, k, v)]
            calls["FLA"] = partial(
                self.fla_gla, *tokens, g_gamma=A, output_final_state=True, cu_seqlens=bounds.long(),
            )  # fmt: skip
        return {name: torch.no_grad()(call) for name, call in calls.items()}

    def verify(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, bias: Tensor,
               states: Tensor, slots: Tensor, snapshots: Tensor, parents: Tensor | None) -> Calls:  # fmt: skip
        """GDN drafts with a state kept for each, and the accepted one copied."""
        if not self.update:
            return {}
        batch, update = len(slots), self.update
        drafts, row = len(q) // batch, lambda t: t.unsqueeze(0)
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * drafts
        own, wide = torch.arange(batch, dtype=torch.int32, device=q.device), slots.long()

        def sglang() -> None:
            update(
                A_log, a, bias, 1.0, 20.0, row(q), row(k), row(v), b, states, slots, use_qk_l2norm_in_kernel=True,
                cu_seqlens=bounds, disable_state_update=True, intermediate_states_buffer=snapshots,
                intermediate_state_indices=own, cache_steps=drafts, retrieve_parent_token=parents,
            )  # fmt: skip
            states.index_copy_(0, wide, snapshots[:batch, 2])

        return {"SGLang snapshots": sglang}


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
