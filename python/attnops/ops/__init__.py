"""The functional API: one function per op, with shapes, dtypes and errors. Each calls `torch.ops.attnops.<name>`."""

from attnops import _load  # noqa: F401  (the ops exist once the modules are loaded)
from attnops.ops.block_lists import build_block_tables, label_scores
from attnops.ops.compressed_kv import compress_kv, compress_plan
from attnops.ops.context_parallel import context_parallel_seqlens, context_parallel_slots
from attnops.ops.draft_slots import copy_page_tail, generate_draft_decode_kv_indices, move_kv
from attnops.ops.fmha import fmha_paged, fmha_plan, fmha_varlen
from attnops.ops.fp4_kv import fp4_decode, store_kv_fp4
from attnops.ops.index_keys import gather_index_k, quantize_index_q, store_index_k
from attnops.ops.indexer import expand_rows, index_logits, index_logits_paged, index_topk, topk_select
from attnops.ops.linear import (
    causal_conv1d,
    causal_conv1d_update,
    clear_states,
    copy_states,
    delta_conv_decode,
    delta_decode,
    ssd_conv_decode,
    ssd_decode,
)
from attnops.ops.linear_prefill import delta_plan, delta_prefill, ssd_plan, ssd_prefill
from attnops.ops.linear_verify import (
    delta_commit,
    delta_draft_step,
    delta_verify,
    ssd_commit,
    ssd_draft_step,
    ssd_verify,
)
from attnops.ops.local_batches import build_local_batches
from attnops.ops.merge_state import merge_state, merge_states
from attnops.ops.mla_decode import mla_decode, mla_decode_plan
from attnops.ops.paged_kv import (
    build_cu_seqlens,
    build_kv_indices,
    build_page_table,
    store_kv,
    store_mla_kv,
    translate_slots,
)
from attnops.ops.sparse_mla import share_lists, sparse_mla_decode, sparse_mla_plan, sparse_mla_prefill
from attnops.ops.speculation import build_draft_tree, pack_tree_mask, verify_tree_greedy, verify_tree_sampling
from attnops.ops.xqa_decode import xqa_decode, xqa_decode_chunks, xqa_decode_plan

__all__ = [
    "build_block_tables",
    "build_cu_seqlens",
    "build_draft_tree",
    "build_kv_indices",
    "build_local_batches",
    "build_page_table",
    "causal_conv1d",
    "causal_conv1d_update",
    "clear_states",
    "compress_kv",
    "compress_plan",
    "context_parallel_seqlens",
    "context_parallel_slots",
    "copy_page_tail",
    "copy_states",
    "delta_commit",
    "delta_conv_decode",
    "delta_decode",
    "delta_draft_step",
    "delta_plan",
    "delta_prefill",
    "delta_verify",
    "expand_rows",
    "fmha_paged",
    "fmha_plan",
    "fmha_varlen",
    "fp4_decode",
    "gather_index_k",
    "generate_draft_decode_kv_indices",
    "index_logits",
    "index_logits_paged",
    "index_topk",
    "label_scores",
    "merge_state",
    "merge_states",
    "mla_decode",
    "mla_decode_plan",
    "move_kv",
    "pack_tree_mask",
    "quantize_index_q",
    "share_lists",
    "sparse_mla_decode",
    "sparse_mla_plan",
    "sparse_mla_prefill",
    "ssd_commit",
    "ssd_conv_decode",
    "ssd_decode",
    "ssd_draft_step",
    "ssd_plan",
    "ssd_prefill",
    "ssd_verify",
    "store_index_k",
    "store_kv",
    "store_kv_fp4",
    "store_mla_kv",
    "topk_select",
    "translate_slots",
    "verify_tree_greedy",
    "verify_tree_sampling",
    "xqa_decode",
    "xqa_decode_chunks",
    "xqa_decode_plan",
]
