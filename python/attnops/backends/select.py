"""Which backend a model gets on a machine, and why not the others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from attnops.backends.base import AttentionBackend
from attnops.backends.hybrid import SPECULATIVE_MODES, HybridAttnBackend
from attnops.backends.machine import Machine, detect_machine
from attnops.backends.registry import NOT_BUILT, get_backend_class, registered_names
from attnops.backends.rules import model_reasons, order, verifying_side
from attnops.types import AttentionSpec, AttentionType, ForwardMode, Limits

PREFILL_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED)
DECODE_MODES = (ForwardMode.DECODE,)
SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)

SLOW = "torch_native"
UNTESTED = "untested_on_hardware: nobody has run it on the hardware it is for; it is taken by name only"


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


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a server wants of its backends besides their names; as of `select`."""

    speculative_eagle_topk: int | None = None
    speculative_num_steps: int | None = None
    model_kind: str | None = None
    cpu_seq_lens: bool = False


_NO_WISHES = Wishes()


def reasons_against(
    name: str,
    spec: AttentionSpec,
    machine: Machine,
    modes: Iterable[ForwardMode] = (),
    wishes: Wishes = _NO_WISHES,
    by_name: bool = True,
) -> list[str]:
    """Why backend `name` does not serve this model on this machine; empty: it does.

    Args:
        by_name: The user asked for it. Otherwise what is untested is a reason, too, and so are lengths that its
            batches must bring to the host and do not (`Wishes.cpu_seq_lens`).
    """
    if _is_not_built(name):
        return [f"not made by its name alone: {NOT_BUILT[name]}"]
    capability, modes = get_backend_class(name).capability, list(modes)
    reasons = capability.machine_reasons(machine, spec) + capability.reasons_against(spec, modes)
    if ForwardMode.TARGET_VERIFY in modes:
        reasons += capability.speculative_reasons(wishes.speculative_eagle_topk, wishes.speculative_num_steps)
    reasons += model_reasons(name, wishes.model_kind)
    if not by_name and capability.untested_on_hardware:
        reasons.append(UNTESTED)
    if not by_name and capability.needs_cpu_seq_lens and not wishes.cpu_seq_lens:
        reasons.append("plans on the host: it needs batches that bring their lengths there (cpu_seq_lens=True)")
    return reasons


def _is_not_built(name: str) -> bool:
    return name in NOT_BUILT and name not in registered_names()


def candidates(
    spec: AttentionSpec, machine: Machine, modes: Iterable[ForwardMode] = (), wishes: Wishes = _NO_WISHES
) -> list[str]:
    """Names in the order in which they are asked for `modes`: of `rules.order`, then those that users registered.

    Of the latter, and of this package's that no rule names, those that compile at run time come last. A backend that is
    not meant for the machine's device (`Capability.chosen_on`) is left out: it runs by name only.
    """
    trees = (wishes.speculative_eagle_topk or 1) > 1
    ruled = order(machine, spec.is_mla, ForwardMode.DECODE in modes, trees)
    others = [name for name in registered_names() if name not in ruled]
    others.sort(key=lambda name: get_backend_class(name).capability.compiles_at_run_time)
    return [name for name in (*ruled, *others) if _is_chosen_on(name, machine.device)]


def _is_chosen_on(name: str, device: str) -> bool:
    if _is_not_built(name):
        return True  # its reason is part of the answer
    devices = get_backend_class(name).capability.chosen_on
    return devices is None or device in devices


def _delegates(name: str, modes: Iterable[ForwardMode]) -> bool:
    """Backend `name`, asked for by name for everything, leaves `modes` to whichever backend serves them."""
    if _is_not_built(name):
        return False
    capability = get_backend_class(name).capability
    return capability.delegates_prefill and not capability.modes.issuperset(modes)


def select(
    spec: AttentionSpec,
    machine: Machine | None = None,
    *,
    speculative: bool = False,
    speculative_eagle_topk: int | None = None,
    speculative_num_steps: int | None = None,
    attention_backend: str | None = None,
    prefill_attention_backend: str | None = None,
    decode_attention_backend: str | None = None,
    mm_attention_backend: str | None = None,
    speculative_attention_mode: str | None = None,
    model_kind: str | None = None,
    cpu_seq_lens: bool = False,
) -> Selection:
    """Chooses the backends of a model. Options as in SGLang's server arguments.

    Args:
        machine: By default the one that this runs on.
        speculative: The model will run verify and draft extend steps, too. Implied by the next two.
        speculative_eagle_topk: Branches of a draft; above 1 its verify steps have tree masks.
        speculative_num_steps: Tokens that a draft is deep; a verify step brings one more at least.
        attention_backend: Name wanted for everything; the next two win over it. Of a backend that only decodes
            (`Capability.delegates_prefill`), prefill is left to the first that serves it.
        speculative_attention_mode: Which side serves speculative steps, "prefill" or "decode"; None: as
            `rules.verifying_side` says, and "prefill" where any name is wanted.
        mm_attention_backend: Of a vision tower, that is of a `spec` of ENCODER_ONLY layers; None: as prefill's.
        model_kind: One of `rules.MODEL_KINDS`, for models that some backends cannot serve whatever their shapes.
        cpu_seq_lens: Batches bring their lengths to the host, too. A backend that needs them is chosen only then.

    Raises:
        NotImplementedError: nothing serves the model, or a wanted backend does not: lists the reasons.
        ValueError: nobody knows a wanted name, a mode or a kind, or a number is below 1.
    """
    machine = detect_machine() if machine is None else machine
    wishes = Wishes(
        speculative_eagle_topk=_at_least_1("speculative_eagle_topk", speculative_eagle_topk),
        speculative_num_steps=_at_least_1("speculative_num_steps", speculative_num_steps),
        model_kind=model_kind,
        cpu_seq_lens=cpu_seq_lens,
    )
    if speculative_attention_mode is None:
        named = attention_backend or prefill_attention_backend or decode_attention_backend
        trees = (speculative_eagle_topk or 1) > 1
        speculative_attention_mode = "prefill" if named else verifying_side(machine, spec.is_mla, trees)
    if speculative_attention_mode not in SPECULATIVE_MODES:
        raise ValueError(
            f"attnops: speculative_attention_mode must be prefill or decode, got {speculative_attention_mode}"
        )
    groups = {"prefill": list(PREFILL_MODES), "decode": list(DECODE_MODES)}
    if speculative or speculative_eagle_topk is not None or speculative_num_steps is not None:
        groups[speculative_attention_mode] += SPECULATIVE
    wanted = {"prefill": prefill_attention_backend, "decode": decode_attention_backend}
    if spec.attn_type is AttentionType.ENCODER_ONLY:  # an encoder never decodes
        groups = {"prefill": [ForwardMode.EXTEND], "decode": [ForwardMode.EXTEND]}
        prefill = mm_attention_backend or prefill_attention_backend
        wanted = {"prefill": prefill, "decode": mm_attention_backend or decode_attention_backend or prefill}
    elif mm_attention_backend is not None and not _is_not_built(mm_attention_backend):
        get_backend_class(mm_attention_backend)  # a tower's; a name that nobody knows is an error here as well
    rejected: dict[str, list[str]] = {}
    chosen = {}
    for group, modes in groups.items():
        name = wanted[group] or attention_backend
        if wanted[group] is None and name is not None and group == "prefill" and _delegates(name, modes):
            name = None
        if name is not None:
            chosen[group] = _wanted(name, spec, machine, modes, wishes)
        else:
            chosen[group] = _first(spec, machine, modes, wishes, rejected)
            if chosen[group] == SLOW and machine.device == "cuda":
                _warn_once(group, spec, rejected)
    return Selection(chosen["prefill"], chosen["decode"], speculative_attention_mode, rejected)


def _warn_once(group: str, spec: AttentionSpec, rejected: dict[str, list[str]]) -> None:
    """A GPU was given loops in torch: say so, and what would have to change."""
    reasons = "".join(f"\n  {name}: {'; '.join(why)}" for name, why in rejected.items())
    text = (
        f"attnops: {group} runs on {SLOW}, since no kernel serves this model here. It loops in torch over keys: those "
        "of the longest request, once the host has heard from the GPU. In a CUDA graph it is Limits.max_seqlen, unless "
        f"AttentionBatch.max_cache_seqlen or max_prefix_tokens says less{reasons}"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


_warned: set[str] = set()


def _at_least_1(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ValueError(f"attnops: {name} must be 1 or more, got {value}")
    return value


def _wanted(name: str, spec: AttentionSpec, machine: Machine, modes: list[ForwardMode], wishes: Wishes) -> str:
    reasons = reasons_against(name, spec, machine, modes, wishes)
    if reasons:
        names = candidates(spec, machine, modes, wishes)
        fitting = [n for n in names if not reasons_against(n, spec, machine, modes, wishes, False)]
        raise NotImplementedError(
            f"attnops: backend {name} does not serve this model here: {'; '.join(reasons)}. "
            f"These would: {', '.join(fitting) or 'none'}"
        )
    return name


def _first(
    spec: AttentionSpec, machine: Machine, modes: list[ForwardMode], wishes: Wishes, rejected: dict[str, list[str]]
) -> str:
    for name in candidates(spec, machine, modes, wishes):
        reasons = reasons_against(name, spec, machine, modes, wishes, by_name=False)
        if not reasons:
            return name
        rejected[name] = reasons
    lines = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
    raise NotImplementedError(f"attnops: no backend serves this model on {machine.device} {machine.name}{lines}")


def select_backend(
    spec: AttentionSpec, limits: Limits, device: torch.device | str | None = None, **options: Any
) -> AttentionBackend:
    """Chooses as `select` does, and builds: one backend, or a hybrid of two.

    Args:
        device: By default the current GPU where there is one, else the CPU.
        options: Of `select`, and of the chosen backends' constructors (`triton_attention_num_kv_splits`, ...).

    Raises:
        TypeError: an option is neither `select`'s nor a chosen backend's; names the backends that are.
        ValueError: a verify step of `speculative_num_steps` has more tokens than `limits` lets a request bring.
    """
    machine = detect_machine(device)
    own = inspect.signature(select).parameters
    selection = select(spec, machine, **{name: value for name, value in options.items() if name in own})
    tokens, most = (options.get("speculative_num_steps") or 0) + 1, limits.max_tokens_per_request
    if tokens > most:
        raise ValueError(
            f"attnops: speculative_num_steps={tokens - 1} brings verify steps of {tokens} tokens or more, above "
            f"max_tokens_per_request = {most} of the limits"
        )
    where = torch.device(machine.torch_device) if device is None else torch.device(device)
    classes = {name: get_backend_class(name) for name in (selection.decode, selection.prefill)}
    more = {name: value for name, value in options.items() if name not in own}
    taken = {name: more.keys() & _constructor_options(cls) for name, cls in classes.items()}
    for option in more.keys() - set().union(*taken.values()):
        owners = [name for name in registered_names() if option in _constructor_options(get_backend_class(name))]
        raise TypeError(
            f"attnops: select_backend got {option}, an option of {' and '.join(owners) or 'no backend'}; chosen are "
            f"{' and '.join(classes)}"
        )
    built = {name: cls(spec, limits, where, **{o: more[o] for o in taken[name]}) for name, cls in classes.items()}
    if not selection.is_hybrid:
        return built[selection.decode]
    return HybridAttnBackend(built[selection.prefill], built[selection.decode], selection.speculative_attention_mode)


def _constructor_options(cls: type[AttentionBackend]) -> set[str]:
    """Names of a backend's own options: what its constructor takes by keyword only."""
    parameters = inspect.signature(cls).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
