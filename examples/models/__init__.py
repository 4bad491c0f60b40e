"""Two small byte-level language models for the examples, in plain PyTorch: grouped-query and latent attention."""

from .config import GqaConfig, MlaConfig, ModelConfig, config_of_kind
from .gqa import GqaAttend, GqaContiguousCache, GqaModel
from .mla import MlaAttend, MlaAttention, MlaContiguousCache, MlaModel
from .sampling import END_OF_TEXT, decode, encode, generate, sample
from .weights import Model, batch_attend, build_model, contiguous_cache, load_model, save_model

__all__ = [
    "END_OF_TEXT",
    "GqaAttend",
    "GqaConfig",
    "GqaContiguousCache",
    "GqaModel",
    "MlaAttend",
    "MlaAttention",
    "MlaConfig",
    "MlaContiguousCache",
    "MlaModel",
    "Model",
    "ModelConfig",
    "batch_attend",
    "build_model",
    "config_of_kind",
    "contiguous_cache",
    "decode",
    "encode",
    "generate",
    "load_model",
    "sample",
    "save_model",
]
