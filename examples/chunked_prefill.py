"""A prompt computed in chunks, one beside a request that decodes, through `RadixAttention` and a backend.

Chunks of 100, 100 and 56 tokens attend to what was stored before them and give what one prefill of 256 tokens gives.
"""

import torch
from attnops.backends import select_backend
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, PagedTokenToKVPoolAllocator, ReqToTokenPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16

spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16, page_size=PAGE)
backend = select_backend(spec, Limits(max_batch_size=4, max_seqlen=512, max_num_tokens=512))
device = backend.device
layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0)
pool = MHATokenToKVPool(4096, PAGE, spec.dtype, KV_HEADS, DIM, layer_num=1, device=device)
allocator, requests = PagedTokenToKVPoolAllocator(4096, PAGE), ReqToTokenPool(4, 512, device)


def step(parts: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """One step of the layer: per request its row, its tokens so far, and q, k, v of its new tokens side by side."""
    rows, begins = [row for row, _, _ in parts], [begin for _, begin, _ in parts]
    counts = [len(qkv) for _, _, qkv in parts]
    ends = [begin + count for begin, count in zip(begins, counts)]
    last_slots = [int(requests.slots(row, begin - 1, begin)) if begin else -1 for row, begin in zip(rows, begins)]
    slots = allocator.alloc_extend(begins, ends, last_slots)
    assert slots is not None, "the pool is large enough"
    for row, begin, new in zip(rows, begins, slots.split(counts)):
        requests.write(row, begin, new)
    lone = [count == 1 for count in counts]
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE if all(lone) else ForwardMode.MIXED if any(lone) else ForwardMode.EXTEND,
        req_pool_indices=torch.tensor(rows, device=device),
        cache_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        extend_seq_lens=torch.tensor(counts, dtype=torch.int32, device=device),
        num_tokens=sum(counts),
        max_seqlen_q=max(counts),
        req_to_token=requests.req_to_token,
        out_cache_loc=slots.to(device),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)  # once per step; what follows, once per layer
    q, k, v = torch.cat([qkv for _, _, qkv in parts]).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
    return layer(q, k, v, batch)


torch.manual_seed(0)
prompt, other = torch.randn(2, 256, (HEADS + 2 * KV_HEADS) * DIM, dtype=spec.dtype, device=device)
whole_row, chunked_row, other_row = requests.alloc(3) or []

whole = step([(whole_row, 0, prompt)])
step([(other_row, 0, other[:30])])
first = step([(chunked_row, 0, prompt[:100])])
both = step([(other_row, 30, other[30:31]), (chunked_row, 100, prompt[100:200])])  # one decodes, one is prefilled
third = step([(chunked_row, 200, prompt[200:])])

chunked = torch.cat([first, both[1:], third])
difference = (chunked - whole).float().norm() / whole.float().norm()
print(f"{backend.name} on {device}: 256 tokens in chunks of 100, 100 and 56; relative difference {difference:.1e}")
assert difference < 6e-3
