"""Which backend a model gets on a machine, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from attnops import _load
from attnops.backends.base import AttentionBackend
from attnops.backends.capability import Machine
from attnops.backends.hybrid import HybridAttnBackend
from attnops.backends.registry import NOT_BUILT, get_backend_class, registered_names
from attnops.types import AttentionSpec, AttentionType, ForwardMode, Limits

PREFILL_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED)
DECODE_MODES = (ForwardMode.DECODE,)
SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)

# Best first. Names that are not built are asked, too: their reason is part of the answer.
_PRIORITY = {
    ("cpu", False): ("intel_amx", "torch_native"),
    ("cpu", True): ("intel_amx", "torch_native"),
    ("cuda", False): ("fa3", "trtllm_mha", "flashinfer", "triton", "torch_native"),
    ("cuda", True): ("flashmla", "cutlass_mla", "trtllm_mla", "fa3", "flashinfer", "triton", "torch_native"),
}


def detect_machine(device: torch.device | str | None = None) -> Machine:
    """What this process would run on; the current GPU when there is one and no device is named."""
    kind = torch.device(device).type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return Machine(device=kind, name=_cpu_name())
    if not torch.cuda.is_available():  # asked about a GPU from a machine without one
        return Machine(device="cuda", name="no CUDA device here")
    index = torch.device(device).index if device is not None else None
    major, minor = torch.cuda.get_device_capability(index)
    loaded = _load.cuda_unavailable_reason is None
    name = torch.cuda.get_device_name(index)
    return Machine(device="cuda", arch=major * 10 + minor, name=name, has_cuda_kernels=loaded)


def _cpu_name() -> str:
    return torch.backends.cpu.get_cpu_capability()


@dataclass(frozen=True)
class Selection:
    """An answer.

    Attributes:
        prefill, decode: Names; one backend serves both where they are equal.
        speculative_attention_mode: Which of the two serves speculative steps.
        rejected: Name to reasons, for every candidate that comes before a chosen one or cannot serve.
    """

    prefill: str
    decode: str
    speculative_attention_mode: str = "prefill"
    rejected: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_hybrid(self) -> bool:
        return self.prefill != self.decode


def reasons_against(name: str, spec: AttentionSpec, machine: Machine, modes: Iterable[ForwardMode] = ()) -> list[str]:
    """Why backend `name` does not serve this model on this machine; empty: it does."""
    if name in NOT_BUILT and name not in registered_names():
        return [f"not built: {NOT_BUILT[name]}"]
    capability = get_backend_class(name).capability
    return capability.machine_reasons(machine) + capability.reasons_against(spec, modes)


def candidates(spec: AttentionSpec, machine: Machine) -> list[str]:
    """Names in the order in which they are asked: this package's, then those that users registered.

    A backend that is not meant for the machine's device (`Capability.chosen_on`) is left out: it runs by name only.
    """
    own = _PRIORITY.get((machine.device, spec.is_mla), ("torch_native",))
    return [name for name in dict.fromkeys([*own, *registered_names()]) if _is_chosen_on(name, machine.device)]


def _is_chosen_on(name: str, device: str) -> bool:
    if name in NOT_BUILT and name not in registered_names():
        return True  # its reason is part of the answer
    devices = get_backend_class(name).capability.chosen_on
    return devices is None or device in devices


def _delegates(name: str, modes: Iterable[ForwardMode]) -> bool:
    """Backend `name`, asked for by name for everything, leaves `modes` to whichever backend serves them."""
    if name in NOT_BUILT and name not in registered_names():
        return False
    capability = get_backend_class(name).capability
    return capability.delegates_prefill and not capability.modes.issuperset(modes)


def select(
    spec: AttentionSpec,
    machine: Machine | None = None,
    *,
    speculative: bool = False,
    attention_backend: str | None = None,
    prefill_attention_backend: str | None = None,
    decode_attention_backend: str | None = None,
    speculative_attention_mode: str = "prefill",
) -> Selection:
    """Chooses the backends of a model. Options as in SGLang's server arguments.

    Args:
        machine: By default the one that this runs on.
        speculative: The model will run verify and draft extend steps, too.
        attention_backend: Name wanted for everything; the next two win over it. Of a backend that only decodes
            (`Capability.delegates_prefill`), prefill is left to the first that serves it.

    Raises:
        NotImplementedError: nothing serves the model, or a wanted backend does not: lists the reasons.
        ValueError: nobody knows a wanted name.
    """
    machine = detect_machine() if machine is None else machine
    groups = {"prefill": list(PREFILL_MODES), "decode": list(DECODE_MODES)}
    if speculative:
        groups[speculative_attention_mode] += SPECULATIVE
    if spec.attn_type is AttentionType.ENCODER_ONLY:
        groups = {"prefill": [ForwardMode.EXTEND], "decode": [ForwardMode.EXTEND]}  # an encoder never decodes
    wanted = {"prefill": prefill_attention_backend, "decode": decode_attention_backend}
    rejected: dict[str, list[str]] = {}
    chosen = {}
    for group, modes in groups.items():
        name = wanted[group] or attention_backend
        if wanted[group] is None and name is not None and group == "prefill" and _delegates(name, modes):
            name = None
        if name is not None:
            chosen[group] = _wanted(name, spec, machine, modes)
        else:
            chosen[group] = _first(spec, machine, modes, rejected)
    return Selection(chosen["prefill"], chosen["decode"], speculative_attention_mode, rejected)


def _wanted(name: str, spec: AttentionSpec, machine: Machine, modes: list[ForwardMode]) -> str:
    reasons = reasons_against(name, spec, machine, modes)
    if reasons:
        fitting = [n for n in candidates(spec, machine) if not reasons_against(n, spec, machine, modes)]
        raise NotImplementedError(
            f"attnops: backend {name} does not serve this model here: {'; '.join(reasons)}. "
            f"These would: {', '.join(fitting) or 'none'}"
        )
    return name


def _first(spec: AttentionSpec, machine: Machine, modes: list[ForwardMode], rejected: dict[str, list[str]]) -> str:
    for name in candidates(spec, machine):
        reasons = reasons_against(name, spec, machine, modes)
        if not reasons:
            return name
        rejected[name] = reasons
    lines = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
    raise NotImplementedError(f"attnops: no backend serves this model on {machine.device} {machine.name}{lines}")


def select_backend(
    spec: AttentionSpec,
    limits: Limits,
    device: torch.device | str | None = None,
    *,
    speculative: bool = False,
    attention_backend: str | None = None,
    prefill_attention_backend: str | None = None,
    decode_attention_backend: str | None = None,
    speculative_attention_mode: str = "prefill",
) -> AttentionBackend:
    """Chooses as `select` does, and builds: one backend, or a hybrid of two.

    Args:
        device: By default the current GPU where there is one, else the CPU.
    """
    machine = detect_machine(device)
    selection = select(
        spec,
        machine,
        speculative=speculative,
        attention_backend=attention_backend,
        prefill_attention_backend=prefill_attention_backend,
        decode_attention_backend=decode_attention_backend,
        speculative_attention_mode=speculative_attention_mode,
    )
    where = torch.device(machine.device) if device is None else torch.device(device)
    decode = get_backend_class(selection.decode)(spec, limits, where)
    if not selection.is_hybrid:
        return decode
    prefill = get_backend_class(selection.prefill)(spec, limits, where)
    return HybridAttnBackend(prefill, decode, speculative_attention_mode)
