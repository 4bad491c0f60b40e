"""attnops in Hugging Face transformers: ``register()``, then ``attn_implementation="attnops"``.

`generate` works with dynamic, sliding and static caches, left padding, windows, soft caps and sinks, eager or compiled.
Continuous batching (`generate_batch`) takes names with "flash" in them only: there it is "attnops_flash_attention_3".
"""

from attnops.plugins.engines import registers
from attnops.plugins.transformers.attention import padded_attention

__all__ = ["CONTINUOUS_NAME", "NAME", "padded_attention", "register"]

NAME = "attnops"
CONTINUOUS_NAME = "attnops_flash_attention_3"


@registers("transformers")
def register() -> None:
    """Makes both names known to transformers; nothing else changes. Returns whether its version is served."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from attnops.plugins.transformers import continuous, masks

    AttentionMaskInterface.register(NAME, masks.key_lists)
    AttentionInterface.register(NAME, masks.attention_forward)
    continuous.register(CONTINUOUS_NAME)
