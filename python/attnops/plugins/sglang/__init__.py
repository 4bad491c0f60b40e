"""attnops in SGLang: the attention backend "attnops", found through the entry point `sglang.srt.plugins`."""

from typing import Any

from attnops.plugins.engines import registers

__all__ = ["NAME", "register"]

NAME = "attnops"
MODEL_CHECKS = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


@registers("sglang")
def register() -> None:
    """Makes the name known to SGLang and to its option's choices. Returns whether its version is served."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    @register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        from attnops.plugins.sglang.backend import AttnopsAttnBackend

        return AttnopsAttnBackend(runner)

    def create_draft_backend(*args: Any, **options: Any) -> Any:
        from attnops.plugins.sglang.drafts import around_create_backend

        return around_create_backend(*args, **options)

    HookRegistry.register(MODEL_CHECKS, _pass_checks_of_models, HookType.AROUND)
    HookRegistry.register(DRAFT_BACKENDS, create_draft_backend, HookType.AROUND)
    choices.add_attention_backend_choices([NAME])
    choices.add_draft_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])


def _pass_checks_of_models(original: Any, *args: Any, **options: Any) -> Any:
    """SGLang checks the backend of some models (GPT-OSS, Gemma 4) against lists that no plug-in can extend.

    There attnops calls itself triton, which serves the same: windows in a pool of their own, and sinks.
    """
    from sglang.srt.arg_groups import model_hook

    names_of = model_hook.attention_backends_of

    def known_names(config: Any) -> tuple[str, ...]:
        return tuple("triton" if name == NAME else name for name in names_of(config))

    model_hook.attention_backends_of = known_names
    try:
        return original(*args, **options)
    finally:
        model_hook.attention_backends_of = names_of
