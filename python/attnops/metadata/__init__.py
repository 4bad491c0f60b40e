"""Tensors that describe a step to the ops: plans, frozen and keyed by the geometry that they were made for."""

from attnops.metadata.block_plan import BlockDecodePlan, BlockPrefillPlan
from attnops.metadata.fmha_plan import FmhaPlan
from attnops.metadata.plan import MlaDecodePlan, XqaDecodePlan
from attnops.metadata.query_rows import QueryRows
from attnops.metadata.sparse_plan import SparseMlaPlan

__all__ = [
    "BlockDecodePlan",
    "BlockPrefillPlan",
    "FmhaPlan",
    "MlaDecodePlan",
    "QueryRows",
    "SparseMlaPlan",
    "XqaDecodePlan",
]
