"""Backends: what answers a `RadixAttention` layer. `select_backend` chooses, `register_attention_backend` adds."""

from attnops.backends.base import AttentionBackend
from attnops.backends.capability import Capability, HeadDims
from attnops.backends.double_sparsity import DoubleSparseAttnBackend
from attnops.backends.dual_chunk import DualChunkFlashAttentionBackend
from attnops.backends.encoder_decoder import EncoderDecoderBackend
from attnops.backends.hybrid import HybridAttnBackend
from attnops.backends.hybrid_linear import HybridLinearAttnBackend
from attnops.backends.linear import (
    GDNAttnBackend,
    KDAAttnBackend,
    LightningAttentionBackend,
    LinearAttnBackend,
    Mamba2AttnBackend,
    ShortConvAttnBackend,
)
from attnops.backends.machine import Machine, detect_machine
from attnops.backends.multi_step import MultiStepDraftBackend
from attnops.backends.nsa_drafts import DeepseekSparseAttnMultiStepBackend, NativeSparseAttnMultiStepBackend
from attnops.backends.registry import get_backend_class, register_attention_backend, registered_names
from attnops.backends.select import Selection, select, select_backend
from attnops.backends.tbo import TboAttnBackend

__all__ = [
    "AttentionBackend",
    "Capability",
    "DeepseekSparseAttnMultiStepBackend",
    "DoubleSparseAttnBackend",
    "DualChunkFlashAttentionBackend",
    "EncoderDecoderBackend",
    "GDNAttnBackend",
    "HeadDims",
    "HybridAttnBackend",
    "HybridLinearAttnBackend",
    "KDAAttnBackend",
    "LightningAttentionBackend",
    "LinearAttnBackend",
    "Machine",
    "Mamba2AttnBackend",
    "MultiStepDraftBackend",
    "NativeSparseAttnMultiStepBackend",
    "Selection",
    "ShortConvAttnBackend",
    "TboAttnBackend",
    "detect_machine",
    "get_backend_class",
    "register_attention_backend",
    "registered_names",
    "select",
    "select_backend",
]
