"""attnops in vLLM: the backends ATTNOPS and ATTNOPS_MLA, found through the entry point `vllm.general_plugins`.

``LLM(attention_backend="ATTNOPS")`` chooses one. vLLM's CPU platform takes no backend but its own: with
ATTNOPS_VLLM_CPU=1 attnops stands in for those there.
"""

import functools
from collections.abc import Callable
from typing import Any

from attnops import environment
from attnops.plugins.engines import registers

__all__ = ["register"]

BACKENDS = {
    "ATTNOPS": "attnops.plugins.vllm.backend.AttnopsBackend",
    "ATTNOPS_MLA": "attnops.plugins.vllm.mla.AttnopsMLABackend",
}
CPU_NAMES = {"CPU_ATTN": "ATTNOPS", "CPU_MLA": "ATTNOPS_MLA"}
# Of prompts of MLA, whose keys and values vLLM expands. vLLM has an enumeration of its own for these.
PREFILL_NAME, PREFILL_BACKEND = "ATTNOPS", "attnops.plugins.vllm.mla_prompts.AttnopsPrefillBackend"


@registers("vllm")
def register() -> None:
    """Makes the names known to vLLM; imports no backend. Returns whether its version is served."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        register_backend(name, path)
        # vLLM pickles its configuration for new processes. They read it before they load plug-ins.
        member: Any = AttentionBackendEnum[name]
        member.__reduce_ex__ = functools.partial(_reduced, backend_named, name)
    register_mla_prefill_backend(PREFILL_NAME, PREFILL_BACKEND)
    member = MLAPrefillBackendEnum[PREFILL_NAME]
    member.__reduce_ex__ = functools.partial(_reduced, prefill_backend_named, PREFILL_NAME)
    if environment.VLLM_CPU.value():
        register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, PREFILL_BACKEND)
        for name, ours in CPU_NAMES.items():
            register_backend(AttentionBackendEnum[name], BACKENDS[ours])


def backend_named(name: str) -> Any:
    """A member of vLLM's enumeration of backends, in a process that may not have loaded plug-ins yet."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def prefill_backend_named(name: str) -> Any:
    """The same of vLLM's enumeration of MLA prefill backends."""
    register()
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    return MLAPrefillBackendEnum[name]


def _reduced(named: Callable[[str], Any], name: str, protocol: object) -> tuple[Any, tuple[str]]:
    return named, (name,)
