"""attnops in vLLM: the backends ATTNOPS and ATTNOPS_MLA, found through the entry point `vllm.general_plugins`.

``LLM(attention_backend="ATTNOPS")`` chooses one. vLLM's CPU platform takes no backend but its own: with
ATTNOPS_VLLM_CPU=1 attnops stands in for those there.
"""

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
    if environment.VLLM_CPU.value():
        for name, ours in CPU_NAMES.items():
            register_backend(AttentionBackendEnum[name], BACKENDS[ours])
