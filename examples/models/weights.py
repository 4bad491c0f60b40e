"""Saving and loading a model: one safetensors file, its configuration in the file's metadata."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .config import GqaConfig, MlaConfig, ModelConfig, config_from_json, config_to_json
from .gqa import GqaBatchAttend, GqaContiguousCache, GqaModel
from .mla import MlaBatchAttend, MlaContiguousCache, MlaModel

Model = GqaModel | MlaModel


def build_model(config: ModelConfig, dropout: float = 0.0) -> Model:
    """A model with fresh weights (dropout acts in training only)."""
    if isinstance(config, GqaConfig):
        return GqaModel(config, dropout)
    if isinstance(config, MlaConfig):
        return MlaModel(config, dropout)
    raise TypeError(f"no model for {type(config).__name__}")


def batch_attend(model: Model, batch: int) -> GqaBatchAttend | MlaBatchAttend:
    """Attention of `batch` equal-length sequences, for training and evaluation."""
    if isinstance(model, GqaModel):
        return GqaBatchAttend(model.config, batch)
    return MlaBatchAttend(model.config, batch)


def contiguous_cache(model: Model, absorbed: bool = True) -> GqaContiguousCache | MlaContiguousCache:
    """An empty reference cache for one sequence, in the model's dtype and on its device."""
    weight = model.embedding.weight
    if isinstance(model, GqaModel):
        return GqaContiguousCache(model.config, weight.dtype, weight.device)
    return MlaContiguousCache(model.config, weight.dtype, weight.device, absorbed)


def save_model(model: Model, path: Path | str, dtype: torch.dtype = torch.bfloat16, notes: str = "") -> None:
    """Writes weights as `dtype`; `notes` (how it was trained) goes into the metadata."""
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, str(path), metadata={"config": config_to_json(model.config), "notes": notes})


def load_model(path: Path | str, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Model:
    """The model in `path`, in eval mode, with weights converted to `dtype`."""
    with safe_open(str(path), framework="pt") as file:
        model = build_model(config_from_json(file.metadata()["config"]))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a dict)
    # Only the parameters: the rotary tables stay fp32 whatever the weights are.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)
