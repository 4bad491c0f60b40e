"""The order in which backends are asked, by machine, and what models of some kinds never get: SGLang's rules.

Where an order was not measured here it is SGLang's own; `docs/choosing.md` says which is which.
"""

from __future__ import annotations

from attnops.backends.machine import Machine

# Ours are compiled ahead of time. Those that compile at run time come behind them, but on Blackwell, whose kernels
# of our own are the portable ones. torch_native serves everything, slowly, so it is last.
# `fa3` and `trtllm_mha` decode by the same kernels. Prefill is the first's; `order` says when decode is the second's.
_HOPPER_MHA = ("fa3", "trtllm_mha", "flashinfer", "triton", "torch_native")
_HOPPER_MLA = ("flashmla", "cutlass_mla", "trtllm_mla", "fa3", "nsa", "dsv4", "flashinfer", "triton", "torch_native")
_AMPERE = (_HOPPER_MHA, ("triton", "flashinfer", "torch_native"))
_BLACKWELL = (("flashinfer", "fa3", "trtllm_mha", "triton", "torch_native"), ("flashinfer", "triton", "torch_native"))

# Best first: (MHA, MLA). Names that are not built or not installed are asked, too: their reason is part of the answer.
_CUDA = {
    90: (_HOPPER_MHA, _HOPPER_MLA),
    **dict.fromkeys((80, 86, 87, 89, 120, 121), _AMPERE),
    **dict.fromkeys((100, 103), _BLACKWELL),
}
_DEVICES = {
    "cpu": ("intel_amx", "nsa", "dsv4", "torch_native"),
    "hip": ("aiter", "triton", "torch_native"),
    "xpu": ("intel_xpu", "triton", "torch_native"),
    "npu": ("ascend", "torch_native"),
}


def order(machine: Machine, is_mla: bool, decodes: bool = False, trees: bool = False) -> tuple[str, ...]:
    """Names, best first. A GPU that no row names is asked as a Hopper one: each backend says what it needs.

    Args:
        decodes: Of the side that decodes. Where our rows are the portable ones, it is `trtllm_mha`'s before `fa3`'s.
        trees: Drafts have more than one branch. So it is on Hopper, too.
    """
    if machine.device != "cuda":
        return _DEVICES[machine.device]
    names = _CUDA.get(machine.arch, _CUDA[90])[is_mla]
    is_portable = machine.arch in _CUDA and machine.arch != 90
    if is_mla or not decodes or not (is_portable or trees):
        return names
    swapped = {"fa3": "trtllm_mha", "trtllm_mha": "fa3"}
    return tuple(swapped.get(name, name) for name in names)


def verifying_side(machine: Machine, is_mla: bool, trees: bool) -> str:
    """Which side serves speculative steps where nobody says: SGLang's "prefill".

    Where `order` gives drafts with branches to another name, it is that name's side, "decode".
    """
    by_another = order(machine, is_mla, decodes=True, trees=trees) != order(machine, is_mla, decodes=True)
    return "decode" if by_another else "prefill"


_LATENTS = "reads latents, and cross attention needs K and V"
_NOT_PLANNED = "plans whole requests on the host, which does not fit"

# Kind of a model -> backend -> why it is never chosen; "": it may be. "*": every other backend.
MODEL_KINDS: dict[str, dict[str, str]] = {
    "local_chunk": {"flashinfer": f"{_NOT_PLANNED} attention in local chunks (Llama 4)"},
    "hybrid_linear": {"flashinfer": f"{_NOT_PLANNED} models that join linear and softmax attention"},
    "encoder_decoder": {
        **dict.fromkeys(("flashmla", "cutlass_mla", "trtllm_mla", "nsa", "dsv4"), _LATENTS),
    },
    "sparse": {"nsa": "", "*": "attends to every key; sparse models have a backend of their own (nsa, dsa)"},
    "compressed": {"dsv4": "", "*": "knows no compressed entries; DeepSeek-V4 has a backend of its own (dsv4)"},
}


def model_reasons(name: str, model_kind: str | None) -> list[str]:
    """Why backend `name` does not serve a model of a kind, whatever its shapes.

    Raises:
        ValueError: nobody knows the kind.
    """
    if model_kind is None:
        return []
    if model_kind not in MODEL_KINDS:
        raise ValueError(f"attnops: model_kind must be one of {', '.join(MODEL_KINDS)}, got {model_kind}")
    rules = MODEL_KINDS[model_kind]
    if rules.get(name) == "":
        return []
    return [rules[key] for key in (name, "*") if key in rules]
