"""What is loaded, what this machine can do, and which backend a model would get: ``python -m attnops.info``.

``--matrix`` prints the table of docs/choosing.md, from what backends declare; ``--plugins`` the engines
that are installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

import attnops
import attnops.layers  # registers its op
from attnops import environment
from attnops.backends import Capability, Machine, Selection, detect_machine, get_backend_class, registered_names, select
from attnops.backends.capability import DTYPE_NAMES, names
from attnops.backends.machine import PACKAGES
from attnops.backends.registry import NOT_BUILT
from attnops.backends.select import UNTESTED
from attnops.plugins.engines import ENGINES, unsupported
from attnops.types import AttentionSpec, AttentionType, ForwardMode

if TYPE_CHECKING:
    from attnops.plugins.adapters import Adapter

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype != torch.uint8}
KV_DTYPES = {**DTYPES, "fp8_rows": torch.uint8}


def op_names() -> list[str]:
    """Every op of `torch.ops.attnops`."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("attnops::") for name in names if name.startswith("attnops::"))


def has_kernel(op: str, key: str) -> bool:
    """The op runs on "CPU" or "CUDA" in this process."""
    name = f"attnops::{op}"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, k) for k in (key, "CompositeExplicitAutograd"))


def kernel_counts() -> dict[str, int]:
    """How often each row of each kernel table was chosen in this process, by "cpu op row" or "cuda op row".

    Tables that no call has asked yet are absent. A call that a layer repeats does not choose again. A row of Hopper's
    `mla_decode` may launch one of several forms of one kernel. What the host chooses by is on its page, in "Which
    kernel a row launches" (docs/kernels).
    """
    counts = {}
    for device, op in (("cpu", "impl_counts"), ("cuda", "impl_counts_cuda")):
        if has_kernel(op, device.upper()):
            for line in getattr(torch.ops.attnops, op)().splitlines():
                row, _, count = line.rpartition(" ")
                counts[f"{device} {row}"] = int(count)
    return counts


def describe_process() -> list[str]:
    """Versions, modules, machine."""
    reason = attnops.cuda_unavailable_reason
    here = detect_machine("cpu")
    lines = [
        f"attnops {attnops.__version__}, torch {torch.__version__}",
        "modules   _C loaded",
        f"          _C_cuda {'loaded' if reason is None else 'not loaded: ' + reason}",
        f"cpu       kernels for {torch.ops.attnops.cpu_isa()} (torch calls it {here.name}), "
        f"{torch.get_num_threads()} threads",
    ]
    if not torch.cuda.is_available():
        return [*lines, "gpu       none that torch can see"]
    for index in range(torch.cuda.device_count()):
        gpu = detect_machine(f"cuda:{index}")
        lines.append(f"gpu {index}     {gpu.name}, sm_{gpu.arch}")
    return lines


def describe_ops() -> list[str]:
    """Which ops run where."""
    lines = []
    for op in op_names():
        where = [key for key in ("CPU", "CUDA") if has_kernel(op, key)]
        lines.append(f"  {op:<32} {' '.join(where) or 'no kernel loaded'}")
    return lines


def describe_backends(machine: Machine) -> list[str]:
    """Which backends run on a machine, and why the others do not."""
    lines = []
    for name in registered_names():
        reasons = get_backend_class(name).capability.machine_reasons(machine)
        lines.append(f"  {name:<22} {'; '.join(reasons) or _runs_here(name, machine)}")
    return [*lines, *(f"  {name:<22} not made by its name alone: {reason}" for name, reason in NOT_BUILT.items())]


def _runs_here(name: str, machine: Machine) -> str:
    capability = get_backend_class(name).capability
    chosen_on = capability.chosen_on
    if capability.untested_on_hardware:
        return f"runs here, when asked for by name: {UNTESTED}"
    return "runs here" if chosen_on is None or machine.device in chosen_on else "runs here, when asked for by name"


def describe_selection(spec: AttentionSpec, machine: Machine, speculative: bool = False) -> list[str]:
    """The choice for a model, with the reasons against those that would have come first."""
    try:
        selection: Selection = select(spec, machine, speculative=speculative)
    except NotImplementedError as error:
        return str(error).splitlines()
    lines = [f"  decode  {selection.decode}", f"  prefill {selection.prefill}"]
    if speculative:
        lines.append(f"  verify  {getattr(selection, selection.speculative_attention_mode)}")
    return [*lines, *(f"  not {name}: {'; '.join(reasons)}" for name, reasons in selection.rejected.items())]


def _yes(holds: bool) -> str:
    return "yes" if holds else "-"


def _modes(capability: Capability) -> str:
    if capability.modes == frozenset(ForwardMode):
        return "all"
    return ", ".join(mode.name.lower() for mode in sorted(capability.modes))


def _devices(capability: Capability) -> str:
    chosen = capability.devices if capability.chosen_on is None else capability.chosen_on
    by_name = [f"{device} by name" for device in sorted(capability.devices - chosen)]
    automatic = [", ".join(sorted(chosen)) + _archs(capability)] if chosen else []
    return ", ".join([*automatic, *by_name])


def _archs(capability: Capability) -> str:
    return "" if capability.archs is None else " sm_" + ", sm_".join(map(str, sorted(capability.archs)))


def _caches(capability: Capability) -> str:
    kinds = capability.kv_dtypes | (capability.mla_kv_dtypes or set())
    return ", ".join(["as q", *sorted(DTYPE_NAMES[dtype] for dtype in kinds)])


# Row of the matrix -> its cell for a capability.
_ROWS: dict[str, Callable[[Capability], str]] = {
    "device": _devices,
    "needs": lambda c: "-" if c.package is None else f"`{PACKAGES[c.package]}`",
    "compiled": lambda c: "at run time" if c.compiles_at_run_time else "ahead of time",
    "tested on its hardware": lambda c: "no: by name only" if c.untested_on_hardware else "yes",
    "modes": _modes,
    "q": lambda c: names(c.dtypes),
    "cache": lambda c: "584-byte rows" if c.compressed else _caches(c),
    "head dims": lambda c: "-" if c.head_dims is None else str(c.head_dims),
    "MLA": lambda c: _yes(c.mla),
    "page size": lambda c: "any" if c.page_sizes is None else ", ".join(map(str, sorted(c.page_sizes))),
    "window": lambda c: "yes, own pool" if c.swa_pool else _yes(c.sliding_window),
    "soft cap": lambda c: _yes(c.logit_cap),
    "sinks": lambda c: _yes(c.sinks),
    "tree mask": lambda c: _yes(c.tree_mask),
    "local chunks": lambda c: _yes(c.local_attention),
    "encoder": lambda c: _yes(AttentionType.ENCODER_ONLY in c.attn_types),
    "batch-invariant": lambda c: _yes(c.deterministic),
    "graph": lambda c: _yes(c.cuda_graph),
}


def support_matrix() -> str:
    """The table of docs/choosing.md: a column per backend, a row per thing that a model may need."""
    backends = registered_names()
    capabilities = [get_backend_class(name).capability for name in backends]
    lines = [["", *(f"`{name}`" for name in backends)], ["---"] * (len(backends) + 1)]
    lines += [[title, *(cell(capability) for capability in capabilities)] for title, cell in _ROWS.items()]
    return "\n".join(_row(cells) for cells in lines)


def describe_plugins() -> list[str]:
    """Which engines are installed, whether their version is served, how to choose attnops, and what each of its
    adapters serves and refuses."""
    from attnops.plugins.adapters import ADAPTERS

    lines = []
    for engine in ENGINES.values():
        found, reason = engine.installed(), unsupported(engine.name)
        lines.append(f"{engine.name:<14} {reason or ' '.join(found or ())}")
        lines.append(f"  option       {engine.option}")
        for adapter in ADAPTERS[engine.name]:
            lines.append(f"  {adapter.name}")
            lines.append(f"    serves     {_served(adapter)}")
            lines += [f"    refuses    {line}" for line in adapter.refusals()]
        lines += [f"  its own      {line}" for line in engine.own]
        lines += [f"  refused      {what}: {why}" for what, why in engine.refused]
    return lines


def _served(adapter: Adapter) -> str:
    capability = adapter.capability()
    here = get_backend_class("intel_amx").capability  # its kernels, on a CPU
    parts = [f"{row} {_ROWS[row](capability)}" for row in adapter.rows if _ROWS[row](capability) != "-"]
    more = names(here.dtypes - capability.dtypes)
    on_a_cpu = f"on a CPU also q {more}" if more else ""
    return "; ".join(filter(None, ["GPUs of" + (_archs(capability) or " every kind"), *parts, on_a_cpu]))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m attnops.info", description=__doc__)
    parser.add_argument("--matrix", action="store_true", help="print the support matrix in Markdown, and nothing else")
    parser.add_argument("--plugins", action="store_true", help="print the engines that are installed, and nothing else")
    parser.add_argument("--device", help="cpu or cuda; by default the GPU where there is one")
    model = parser.add_argument_group("a model: which backend would it get?")
    model.add_argument("--num-q-heads", type=int, default=32)
    model.add_argument("--num-kv-heads", type=int, default=8)
    model.add_argument("--head-dim", type=int, default=128)
    model.add_argument("--v-head-dim", type=int, default=-1)
    model.add_argument("--mla", action="store_true", help="absorbed MLA: one latent head of 576, values of 512")
    model.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    model.add_argument("--kv-dtype", choices=sorted(KV_DTYPES), help="of the cache; by default as --dtype")
    model.add_argument("--page-size", type=int, default=64)
    model.add_argument("--sliding-window", type=int, default=-1)
    model.add_argument("--logit-cap", type=float, default=0.0)
    model.add_argument("--sinks", action="store_true")
    model.add_argument("--encoder", action="store_true", help="an encoder: no cache, no causal mask")
    model.add_argument("--speculative", action="store_true", help="with verify and draft extend steps")
    model.add_argument("--deterministic", action="store_true", help="batch-invariant")
    return parser


def _spec(options: argparse.Namespace) -> AttentionSpec:
    common = {
        "dtype": DTYPES[options.dtype],
        "kv_dtype": KV_DTYPES[options.kv_dtype] if options.kv_dtype else None,
        "page_size": options.page_size,
        "sliding_window_size": options.sliding_window,
        "logit_cap": options.logit_cap,
        "has_sinks": options.sinks,
        "deterministic": options.deterministic,
    }
    if options.mla:
        return AttentionSpec.mla(options.num_q_heads, **common)
    return AttentionSpec(
        num_q_heads=options.num_q_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        v_head_dim=options.v_head_dim,
        attn_type=AttentionType.ENCODER_ONLY if options.encoder else AttentionType.DECODER,
        **common,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.matrix:
        print(support_matrix())
        return
    if options.plugins:
        print("\n".join(describe_plugins()))
        return
    try:
        spec = _spec(options)
    except ValueError as error:
        parser.error(str(error))
    variables = ("environment variables that are set", environment.describe() or ["  none"])
    try:
        machine, process = detect_machine(options.device), describe_process()
    except (RuntimeError, ValueError) as error:  # a malformed variable, which the list names
        raise SystemExit("\n".join([variables[0], *variables[1], "", str(error)])) from None
    sections = [
        ("", process),
        variables,
        ("ops", describe_ops()),
        (f"backends on {machine.device}", describe_backends(machine)),
        (f"a model of {_name(spec)} on {machine.device}", describe_selection(spec, machine, options.speculative)),
    ]
    for title, lines in sections:
        print("\n".join([f"\n{title}", *lines] if title else lines))


def _name(spec: AttentionSpec) -> str:
    if spec.is_mla:
        return f"MLA, {spec.num_q_heads} heads, {DTYPE_NAMES[spec.dtype]}"
    return f"{spec.num_q_heads}/{spec.num_kv_heads} heads of {spec.head_dim}, {DTYPE_NAMES[spec.dtype]}"


if __name__ == "__main__":
    main()
