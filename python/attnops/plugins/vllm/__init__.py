"""attnops in vLLM: the backends ATTNOPS and ATTNOPS_MLA, found through the entry point `vllm.general_plugins`.

``LLM(attention_backend="ATTNOPS")`` chooses one. vLLM's CPU platform takes no backend but its own: with
ATTNOPS_VLLM_CPU=1 attnops stands in for those there.
"""

import functools
from typing import Any

from attnops import environment
from attnops.plugins.engines import registers

__all__ = ["register"]

BACKENDS = {
    "ATTNOPS": "attnops.plugins.vllm.backend.AttnopsBackend",
    "ATTNOPS_MLA": "attnops.plugins.vllm.mla.AttnopsMLABackend",
}
CPU_NAMES = {"CPU_ATTN": "ATTNOPS", "CPU_MLA": "ATTNOPS_MLA"}


@registers("vllm")
def register() -> None:
    """Makes both names known to vLLM; imports neither backend. Returns whether its version is served."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        register_backend(name, path)
        # vLLM pickles its configuration for new processes. They read it before they load plug-ins.
        member: Any = AttentionBackendEnum[name]
        member.__reduce_ex__ = functools.partial(_reduced, name)
    if environment.VLLM_CPU.value():
        for name, ours in CPU_NAMES.items():
            register_backend(AttentionBackendEnum[name], BACKENDS[ours])


def backend_named(name: str) -> Any:
    """A member of vLLM's enumeration of backends, in a process that may not have loaded plug-ins yet."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def _reduced(name: str, protocol: object) -> tuple[Any, tuple[str]]:
    return backend_named, (name,)
