"""A model's decode steps through whole-step graphs, segments and compiled pieces: lengths change, the graphs do not.

On CUDA all three; on a CPU, which has no graphs, the pieces of torch.compile. Each gives what the eager model gives.
"""

import torch
from attnops.backends import select_backend
from attnops.graphs import CudaGraphs, GraphRunner, PiecewiseRunner, SegmentRunner
from attnops.layers import RadixAttention
from attnops.pools import MHATokenToKVPool, ReqToTokenPool
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode, Limits

HEADS, KV_HEADS, DIM, PAGE, LAYERS, VOCAB, CONTEXT, BATCH = 8, 2, 64, 16, 4, 100, 512, 6


class Model(torch.nn.Module):
    """Residual attention layers between an embedding and a head. An engine's model calls its layers in the same way."""

    def __init__(self) -> None:
        super().__init__()
        width, out = HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM
        self.embedding, self.head = torch.nn.Embedding(VOCAB, width), torch.nn.Linear(width, VOCAB)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, out) for _ in range(LAYERS))
        self.attention = torch.nn.ModuleList(
            RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id) for layer_id in range(LAYERS)
        )

    def forward(self, input_ids, positions, batch=None):
        x = self.embedding(input_ids)
        for project, attend in zip(self.qkv, self.attention):
            q, k, v = project(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
            x = x + attend(q, k, v, batch)
        return self.head(x)


torch.manual_seed(0)
spec = AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE)
backend = select_backend(spec, Limits(max_batch_size=8, max_seqlen=CONTEXT))
device = backend.device
model = Model().to(device, spec.dtype)
requests = ReqToTokenPool(8, CONTEXT, device)
pool = MHATokenToKVPool(8 * CONTEXT, PAGE, spec.dtype, KV_HEADS, DIM, LAYERS, device=device)
for pages in (*pool.k_buffer, *pool.v_buffer):
    pages.normal_()  # what the requests have in the cache


def draw_step() -> tuple[torch.Tensor, AttentionBatch]:
    """One to six requests with other lengths, slots and rows than any step before."""
    size = int(torch.randint(1, BATCH + 1, ()))
    rows, lengths = torch.randperm(8)[:size], torch.randint(1, CONTEXT, (size,))
    slots = (torch.randperm(8 * CONTEXT // PAGE).view(8, -1, 1) * PAGE + torch.arange(PAGE)).flatten(1)
    for row in range(8):
        requests.write(row, 0, slots[row])
    batch = AttentionBatch(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=rows.to(device),
        cache_seqlens=lengths.int().to(device),
        num_tokens=size,
        req_to_token=requests.req_to_token,
        out_cache_loc=slots[rows, lengths - 1].to(device),
        positions=(lengths - 1).to(device),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    return torch.randint(0, VOCAB, (size,)).to(device), batch


if device.type == "cuda":
    shared = CudaGraphs()  # the runners take turns, so they may share memory
    runners = {
        "whole steps": GraphRunner(model, backend, requests.req_to_token, pool, sizes=[1, 2, 4, 8], recorder=shared),
        "segments": SegmentRunner(model, backend, sizes=[1, 2, 4, 8], recorder=shared),
        "pieces": PiecewiseRunner(model, backend, sizes=[2, 4, 8], recorder=shared),
    }
else:
    runners = {"pieces": PiecewiseRunner(model, backend, sizes=[2, 4, 8])}

for name, runner in runners.items():
    runner.capture()
    worst = 0.0
    for _ in range(20):
        input_ids, batch = draw_step()
        replayed = runner.replay(input_ids, batch).clone()
        backend.init_forward_metadata(batch)
        with torch.no_grad():
            eager = model(input_ids, batch.positions, batch)
        worst = max(worst, float((replayed - eager).float().norm() / eager.float().norm()))
    print(f"{name} on {device}: 20 steps of other requests; relative difference to eager {worst:.1e}")
    assert worst < 1e-2
