"""Modules by the peers' names over `attnops.compat`, and "cuda" that means the CPU: for `peer_child.py` alone."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


class Absent(Exception):
    """A name of a peer that `attnops.compat` does not have."""


class Placeholder:
    """Stands for a name that is not there: it may be imported and looked into, but not used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *args, **options):
        raise Absent(self._name)

    def __or__(self, other):  # of annotations
        return self

    __ror__ = __or__


class Shim(types.ModuleType):
    """A module of the names given; any other is a `Placeholder`, and so is a submodule."""

    def __init__(self, name: str, names: dict | None = None) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__dict__.update(names or {})
        sys.modules[name] = self
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, self)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class ShimFinder:
    """Imports of any submodule of a shim: one that has nothing."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        root = name.partition(".")[0]
        if isinstance(sys.modules.get(root), Shim):
            return importlib.machinery.ModuleSpec(name, ShimFinder)
        return None

    @staticmethod
    def create_module(spec):
        return sys.modules.get(spec.name) or Shim(spec.name)

    @staticmethod
    def exec_module(module) -> None:
        pass


def _public(module: types.ModuleType) -> dict:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def flashinfer(capability: tuple[int, int]) -> None:
    """`flashinfer` and the submodules that its tests name; utilities that choose tests answer for Hopper."""
    from attnops.compat import flashinfer as ours

    names = _public(ours)
    Shim("flashinfer", names)
    for part in ("decode", "prefill", "page", "cascade", "mla", "attention", "xqa_module", "cudnn", "sparse"):
        Shim(f"flashinfer.{part}", names)
    cudnn = {"CUDNN_AVAILABLE": True, "_cudnn_supports_direct_seqlens": lambda dtype, mixed=False: True}
    Shim("flashinfer.cudnn.prefill", names | cudnn)
    answers = {
        "get_compute_capability": lambda device=None: capability,
        "has_flashinfer_jit_cache": lambda: True,
        "is_sm90a_supported": lambda device=None: capability[0] == 9,
        "device_support_pdl": lambda device=None: capability[0] >= 9,
    }
    answers["GPUArchitectureError"] = type("GPUArchitectureError", (Exception,), {})
    for arch in ("100a", "100f", "110a", "120a", "121a", "12x", "100", "10x"):
        answers[f"is_sm{arch}_supported"] = lambda device=None: False
    Shim("flashinfer.utils", answers)
    Shim("flashinfer.jit", {"build_jit_specs": lambda *args, **options: None})
    Shim("flashinfer.jit.utils", {"filename_safe_dtype_map": {torch.float16: "f16", torch.bfloat16: "bf16"}})
    Shim("flashinfer.jit.attention")
    Shim("flashinfer.jit.attention.variants", {"attention_sink_decl": dict.fromkeys(("fa2", "fa3", "auto"), "")})
    Shim("flashinfer.quantization", {"packbits": packbits, "segment_packbits": segment_packbits})
    Shim("flashinfer.rope", {"apply_rope_pos_ids": apply_rope_pos_ids})
    sys.modules["flashinfer"].packbits = packbits
    sys.modules["flashinfer"].segment_packbits = segment_packbits


def flash_attention(directory: Path) -> None:
    """FlashAttention-3's module and -2's package; the rest of the package is the peer's own."""
    from attnops.compat import flash_attn as second
    from attnops.compat import flash_attn_interface as third

    Shim("flash_attn_interface", _public(third))
    package = Shim("flash_attn", _public(second))
    package.__path__ = [str(directory / "flash_attn")]
    package.flash_attn_interface = Shim("flash_attn.flash_attn_interface", _public(second))
    try:
        importlib.import_module("triton")
    except ImportError:
        Shim("flash_attn.layers")
        Shim("flash_attn.layers.rotary", {"apply_rotary_emb": apply_rotary_emb})


def flash_mla() -> None:
    from attnops.compat import flash_mla as ours

    Shim("flash_mla", _public(ours))


def sgl_kernel() -> None:
    from attnops.compat import sgl_kernel as ours

    Shim("sgl_kernel", _public(ours))
    Shim("sgl_kernel.flash_attn", _public(ours.flash_attn))
    Shim("sgl_kernel.flash_mla", _public(ours.flash_mla))
    Shim("sgl_kernel.sparse_flash_attn", _public(ours.sparse_flash_attn))


# What the peers' tests call beside attention, in plain torch.


def packbits(x, bitorder: str = "big"):
    bits = torch.nn.functional.pad(x.to(torch.uint8), (0, -x.numel() % 8)).view(-1, 8)
    order = torch.arange(7, -1, -1) if bitorder == "big" else torch.arange(8)
    return (bits << order.to(bits.device, torch.uint8)).sum(-1).to(torch.uint8)


def segment_packbits(x, indptr, bitorder: str = "big"):
    parts = [packbits(x[a:b], bitorder) for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist())]
    sizes = torch.tensor([0, *[part.numel() for part in parts]])
    return torch.cat(parts), sizes.cumsum(0).to(indptr.device, indptr.dtype)


def apply_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1.0, rope_theta=1e4):
    width = rotary_dim or q.shape[-1]
    steps = torch.arange(0, width, 2, device=q.device) / width
    angles = pos_ids.double()[:, None] / rope_scale / rope_theta ** steps.double()
    shared = (angles.cos().float(), angles.sin().float())
    return tuple(apply_rotary_emb(x.unsqueeze(0), *shared, interleave)[0] for x in (q, k))


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Of ``[B, S, H, D]`` with tables ``[limit, R / 2]``, in float32."""
    steps = torch.arange(x.shape[1], device=x.device)
    offsets = seqlen_offsets if torch.is_tensor(seqlen_offsets) else torch.full((x.shape[0],), seqlen_offsets)
    at = offsets.to(x.device).long()[:, None] + steps
    cos, sin = (table.float()[at.clamp(max=table.shape[0] - 1)].unsqueeze(2) for table in (cos, sin))
    width = 2 * cos.shape[-1]
    front = x[..., :width].float()
    a, b = (front[..., 0::2], front[..., 1::2]) if interleaved else front.chunk(2, -1)
    parts = [a * cos - b * sin, a * sin + b * cos]
    front = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([front.to(x.dtype), x[..., width:]], -1)


class SparseMatrices:
    """What two tests of blocks need of `scipy.sparse`."""

    @staticmethod
    def random(rows: int, columns: int, density: float, random_state):
        at = np.sort(random_state.choice(rows * columns, round(density * rows * columns), replace=False))
        ends = np.searchsorted(at, np.arange(rows + 1) * columns).astype(np.int32)
        made = types.SimpleNamespace(indptr=ends, indices=(at % columns).astype(np.int32), nnz=at.size)
        return types.SimpleNamespace(tocsr=lambda: made)

    @staticmethod
    def bsr_matrix(blocks: tuple, shape: tuple[int, int]):
        data, columns, ends = blocks
        height, width = data.shape[1:]
        dense = np.zeros((shape[0] // height, shape[1] // width, height, width), data.dtype)
        dense[np.repeat(np.arange(len(ends) - 1), np.diff(ends)), columns] = data
        return types.SimpleNamespace(toarray=lambda: dense.transpose(0, 2, 1, 3).reshape(shape))


class CudaIsCpu(TorchFunctionMode):
    """Every device argument that says "cuda" says "cpu"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.is_cuda.__get__:
            return True
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        return function(*[_on_cpu(value) for value in args], **kwargs)


def _on_cpu(value):
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class NeedsGpu(Exception):
    """What has no meaning on a CPU."""


def _nothing(name: str):
    def nothing(*args, **options) -> None:
        return None

    nothing.__name__ = name
    return nothing


def _needs_gpu(*args, **options):
    raise NeedsGpu


class _Idle:
    """A stream or an event that has nothing to do."""

    cuda_stream = 0

    def __init__(self, *args, **options) -> None:
        pass

    def elapsed_time(self, other) -> float:
        return 1.0

    def __getattr__(self, name: str):
        return lambda *args, **options: None

    def __enter__(self):
        return self

    def __exit__(self, *args) -> None:
        return None


def cuda_is_cpu(capability: tuple[int, int]) -> CudaIsCpu:
    """Makes `torch.cuda` answer for a Hopper GPU that computes nothing; the mode that the tests must run under."""
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132, name="cpu")
    properties.total_memory = 80 << 30
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "cpu",
        "mem_get_info": lambda device=None: (4 << 30, 8 << 30),
        "Stream": _Idle,
        "Event": _Idle,
        "stream": lambda stream: _Idle(),
        "current_stream": lambda device=None: _Idle(),
        "CUDAGraph": _needs_gpu,
        "graph": _needs_gpu,
    }.items():
        setattr(torch.cuda, name, value)
    for name in (
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_device",
        "set_stream",
        "reset_peak_memory_stats",
    ):
        setattr(torch.cuda, name, _nothing(name))  # each its own: torch has tables by function
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.set_default_device = _nothing("set_default_device")
    generator = torch.Generator
    torch.Generator = type(
        "Generator", (generator,), {"__new__": lambda cls, device="cpu": generator.__new__(generator)}
    )
    return CudaIsCpu()


sys.meta_path.append(ShimFinder)
