"""Steps of `steps.py` on a GPU, eager and captured: what the tests of the backends with CUDA kernels share."""

from __future__ import annotations

import dataclasses

import torch
from attnops.backends import get_backend_class
from attnops.pools import DSATokenToKVPool, KVCache, MLATokenToKVPool, SWAKVPool
from attnops.types import ForwardMode
from sparse_lists import with_lists
from steps import LIMITS, Model, Step, make_step

# Two steps of one shape: what is captured, and what a replay then finds in its place.
SHAPES = {
    "decode": (ForwardMode.DECODE, ([0, 1, 0, 2], [1] * 4), ([63, 64, 150, 17], [1] * 4), {"uniform": True}),
    "verify": (ForwardMode.TARGET_VERIFY, ([0, 1, 2], [5] * 3), ([59, 100, 0], [5] * 3), {"uniform": True}),
    "tree": (ForwardMode.TARGET_VERIFY, ([0, 1, 2], [5] * 3), ([59, 100, 0], [5] * 3), {"uniform": True, "tree": True}),
    "draft_extend": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [3] * 3), ([62, 7, 130], [3] * 3), {"uniform": True}),
    "draft_extend_ragged": (ForwardMode.DRAFT_EXTEND, ([2, 3, 0], [1, 3, 2]), ([62, 7, 130], [3, 2, 1]), {}),
}


def _move(pool: KVCache) -> None:
    if isinstance(pool, SWAKVPool):
        _move(pool.full_kv_pool)
        _move(pool.swa_kv_pool)
        pool.slot_map = pool.slot_map.cuda()
    else:
        for kind in ("kv",) if isinstance(pool, MLATokenToKVPool) else ("k", "v"):
            for name in (f"{kind}_buffer", f"{kind}_scale_buffer"):
                if hasattr(pool, name):  # an FP4 pool has scales, too
                    setattr(pool, name, [pages.cuda() for pages in getattr(pool, name)])
    if isinstance(pool, DSATokenToKVPool):
        pool.index_k_with_scale_buffer = [pages.cuda() for pages in pool.index_k_with_scale_buffer]
    pool.device = torch.device("cuda", torch.cuda.current_device())


def on_gpu(step: Step) -> Step:
    """The step with everything that a backend sees on the GPU; the answer stays."""
    batch = step.batch
    if batch.token_to_kv_pool is not None:
        _move(batch.token_to_kv_pool)
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: value.cuda() for name, value in values.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(
        step,
        layer=step.layer.cuda(),
        batch=dataclasses.replace(batch, **moved),
        q=step.q.cuda(),
        k=step.k.cuda(),
        v=step.v.cuda(),
        lists=None if step.lists is None else step.lists.cuda(),
    )


def step_of(model: Model, shape: str, which: int) -> Step:
    """The captured (0) or the replayed (1) step of a shape, with lists where the model is sparse."""
    mode, *lengths, options = SHAPES[shape]
    step = make_step(model, mode, *lengths[which], seed=which, **options)
    return on_gpu(with_lists(step, which) if model.spec.sparse_topk else step)


def eager(name: str, step: Step) -> torch.Tensor:
    backend = get_backend_class(name)(step.model.spec, LIMITS, device="cuda")
    backend.init_forward_metadata(step.batch)
    return step.run(backend)


def check_replay(name: str, model: Model, shape: str, replays: int = 2) -> None:
    """A captured step, replayed with other lengths, tables and requests, equals a fresh eager one bit for bit."""
    static, other = (step_of(model, shape, which) for which in (0, 1))
    expected = eager(name, step_of(model, shape, 1))
    backend = get_backend_class(name)(model.spec, LIMITS, device="cuda")
    backend.init_cuda_graph_state(LIMITS.max_batch_size, LIMITS.max_num_tokens)
    backend.init_forward_metadata_out_graph(static.batch, in_capture=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(static.batch)
        out = static.run(backend)
    differing = torch.zeros((), dtype=torch.int32, device="cuda")  # read once: a replay waits for none before it
    for _ in range(replays):
        static.overwrite(other)
        backend.init_forward_metadata_out_graph(static.batch)
        graph.replay()
        differing += (out != expected).any()
    assert int(differing) == 0, f"{int(differing)} of {replays} replays differ from the eager step"
