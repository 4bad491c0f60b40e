"""One decode step, op by op: each request's new token is stored in its page, then attends to the request's cache."""

import torch
import torch.nn.functional as F
from attnops.metadata import XqaDecodePlan

device = "cuda" if torch.cuda.is_available() else "cpu"
ops = torch.ops.attnops
heads, kv_heads, dim, page_size = 32, 8, 128, 64
torch.manual_seed(0)

# Three requests with these many cached tokens, the new one included. Slot of a token = page * page_size + offset.
cache_seqlens = torch.tensor([1000, 17, 4096], dtype=torch.int32, device=device)
pages = torch.randperm(3 * 64, device=device, dtype=torch.int32).view(3, 64, 1)
req_to_token = (pages * page_size + torch.arange(page_size, device=device, dtype=torch.int32)).flatten(1)
rows = torch.arange(3, device=device)
new_slots = req_to_token[rows, cache_seqlens.long() - 1]
pool = torch.randn(2, 3 * 64, page_size, kv_heads, dim, device=device).bfloat16()
k_pages, v_pages = pool
q = torch.randn(3, 1, heads, dim, device=device).bfloat16()
k, v = torch.randn(2, 3, kv_heads, dim, device=device).bfloat16()

# Once per step, for all layers. Nothing here reads a length on the host, so all of it may stand in a CUDA graph.
table = torch.zeros(3, 64, dtype=torch.int32, device=device)
plan = XqaDecodePlan.allocate(3, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, device=device)
share, splits = plan.tile_scheduler_metadata, plan.num_splits
ops.build_page_table(table, req_to_token, rows, cache_seqlens, page_size)
ops.xqa_decode_plan(share, splits, cache_seqlens, 1, kv_heads)

# Once per layer. `attnops.ops.xqa_decode` is the same with fewer arguments.
out, scratch = torch.empty_like(q), (plan.out_partial, plan.lse_partial, plan.semaphores)
ops.store_kv(k_pages, v_pages, k, v, new_slots)
ops.xqa_decode(
    out, None, q, k_pages, v_pages, table, None, cache_seqlens, share, splits, *scratch, softmax_scale=dim**-0.5
)

for row, length in enumerate(cache_seqlens.tolist()):
    keys, values = (pool[i].flatten(0, 1)[req_to_token[row, :length]].transpose(0, 1) for i in range(2))
    expected = F.scaled_dot_product_attention(q[row].transpose(0, 1), keys, values, enable_gqa=True).transpose(0, 1)
    print(f"request {row}: {length} tokens, largest difference to PyTorch {(out[row] - expected).abs().max():.1e}")
