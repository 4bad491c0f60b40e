"""Wave's attention (package wave-lang, HIP) as a backend: its published kernels, compiled by it at the first call.

Wave publishes makers of kernels, and a function that compiles what they make. A kernel belongs to head counts, dtypes,
scale and soft cap. Decode is its paged decode in two phases. Other steps are its extend: prefix from tokens in the
cache, the rest from k and v.

Nobody here has run it on its hardware. `tests/backends/test_wave.py` holds every call to the published signatures.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnops.backends.capability import DECODER_MODES, SIXTEEN_BIT, Capability, HeadDims
from attnops.backends.registry import register_attention_backend
from attnops.backends.vendors import VendorBackend, VendorCall

_MODULES = {
    "attention_common": "wave_lang.kernel.wave.templates.attention_common",
    "decode": "wave_lang.kernel.wave.templates.paged_decode_attention",
    "extend": "wave_lang.kernel.wave.templates.extend_attention",
    "constraints": "wave_lang.kernel.wave.constraints",
    "compile": "wave_lang.kernel.wave.compile",
    "scheduling": "wave_lang.kernel.wave.utils.general_utils",
    "run": "wave_lang.kernel.wave.utils.run_utils",
}
_KV_SPLITS = 8
_BLOCK_TOKENS = 32  # of a decode step, as in SGLang


def load_wave() -> Any:
    """The modules of the package that the adapter calls."""
    return SimpleNamespace(**{name: importlib.import_module(path) for name, path in _MODULES.items()})


class Wave:
    """The vendor's functions, with what they compiled."""

    def __init__(self, modules: Any) -> None:
        self._modules = modules
        self._decode_kernels = functools.cache(self._make_decode)
        self._extend_kernel = functools.cache(self._make_extend)

    def _compile(self, kernel: Any, symbols: dict[Any, Any], dynamic: list[Any], **options: Any) -> Any:
        m = self._modules
        symbols.update(m.scheduling.get_default_scheduling_params())
        made = m.compile.WaveCompileOptions(
            subs=symbols, canonicalize=True, run_bench=False, dynamic_symbols=dynamic, wave_runtime=True, **options
        )
        return m.compile.wave_compile(m.run.set_default_run_config(made), kernel)

    def _make_decode(
        self, heads: tuple[int, int, int], requests: int, dtype: torch.dtype, scale: float, cap: float
    ) -> Any:
        m, (q_heads, kv_heads, dim) = self._modules, heads
        shape = m.decode.paged_decode_attention_shape(
            num_query_heads=q_heads,
            num_kv_heads=kv_heads,
            head_size=dim,
            head_size_kv=dim,
            block_size=_BLOCK_TOKENS,
            num_seqs=requests,
        )
        instruction = m.constraints.MMAType.F32_16x16x16_F16
        variant = (instruction, instruction)
        if q_heads == kv_heads:  # one row is too few for a matrix instruction
            rows = m.constraints.MMAOperand.M
            variant = tuple(
                m.constraints.GenericDot(along_dim=rows, k_vec_size=vec, k_mult=mult) for vec, mult in ((4, 1), (1, 64))
            )
        first, second, symbols, more_symbols, dynamic, more_dynamic = m.decode.get_paged_decode_attention_kernels(
            shape,
            variant,
            _KV_SPLITS,
            input_dtype=dtype,
            output_dtype=dtype,
            layer_scaling=scale,
            logit_cap=cap,
        )
        scratch = m.decode.get_paged_decode_intermediate_arrays_shapes(shape, _KV_SPLITS)
        return (
            self._compile(first, symbols, dynamic, use_buffer_ops=True, waves_per_eu=2),
            self._compile(second, more_symbols, more_dynamic, use_buffer_ops=False, waves_per_eu=4),
            scratch,
        )

    def decode(self, c: VendorCall) -> Tensor:
        k, v = c.k_pages.flatten(0, 1), c.v_pages.flatten(0, 1)
        heads = (c.q.shape[1], k.shape[1], c.q.shape[2])
        first, second, shapes = self._decode_kernels(heads, c.q.shape[0], c.q.dtype, c.scale, c.cap)
        logits, highest = (torch.empty(shape, dtype=torch.float32, device=c.q.device) for shape in shapes)
        out = torch.empty_like(c.q)
        first(c.q, k, v, c.indptr, c.indices, logits, highest)
        second(logits, highest, c.indptr, out)
        return out

    def _make_extend(
        self,
        heads: tuple[int, int, int],
        shapes: tuple[tuple[int, ...], ...],
        most: int,
        requests: int,
        dtype: torch.dtype,
        causal: bool,
        scale: float,
        cap: float,
    ) -> Any:
        m, (q_heads, kv_heads, dim) = self._modules, heads
        shape = m.attention_common.AttentionShape(
            num_query_heads=q_heads,
            num_kv_heads=kv_heads,
            head_size=dim,
            head_size_kv=dim,
            num_seqs=requests,
            max_seq_len=most,
        )
        variant = (m.constraints.MMAType.F32_16x16x32_K8_F16, m.constraints.MMAType.F32_16x16x16_F16)
        kernel, symbols, dynamic = m.extend.get_extend_attention_kernel(
            shape,
            variant,
            *shapes,
            input_dtype=dtype,
            output_dtype=dtype,
            size_dtype=torch.int32,
            is_causal=causal,
            layer_scaling=scale,
            logit_cap=cap,
        )
        return self._compile(kernel, symbols, dynamic, use_buffer_ops=True)

    def extend(self, c: VendorCall) -> Tensor:
        if c.new is None:
            raise ValueError("attnops: backend wave reads a step's own tokens from k and v, and its layer brought none")
        k, v = c.k_pages.flatten(0, 1), c.v_pages.flatten(0, 1)
        tensors = (c.q, *c.new, k, v)
        out = torch.empty_like(c.q)
        shapes = tuple(tuple(tensor.shape) for tensor in (*tensors, out))
        heads = (c.q.shape[1], k.shape[1], c.q.shape[2])
        requests = c.lens.shape[0]
        kernel = self._extend_kernel(heads, shapes, c.step.max_q, requests, c.q.dtype, c.causal, c.scale, c.cap)
        kernel(*tensors, c.step.bounds_q, c.indptr, c.indices, c.step.max_q, out)
        return out


def _call(wave: Wave, c: VendorCall) -> Tensor:
    return wave.decode(c) if c.is_decode else wave.extend(c)


@register_attention_backend("wave")
class WaveBackend(VendorBackend):
    """Every step of chains, over tables of tokens. No windows and no sinks."""

    capability = Capability(
        devices=frozenset({"hip"}),
        package="wave_lang",
        compiles_at_run_time=True,
        untested_on_hardware=True,
        dtypes=SIXTEEN_BIT,
        modes=DECODER_MODES,
        head_dims=HeadDims(64, 256, 64),
        widens_pages=True,
        logit_cap=True,
    )
    module, function, call = "wave_lang.kernel.wave.compile", "wave_compile", staticmethod(_call)
    reads_new_tokens = True

    def _load(self) -> Wave:
        super()._load()  # names the package where it is absent
        return Wave(load_wave())
