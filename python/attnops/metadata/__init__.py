"""Tensors that describe a step to the ops: plans, frozen and keyed by the geometry that they were made for."""

from attnops.metadata.plan import MlaDecodePlan, XqaDecodePlan

__all__ = ["MlaDecodePlan", "XqaDecodePlan"]
