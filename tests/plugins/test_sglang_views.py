"""SGLang's pools as pages: views are kept, and made again where a layer's memory has changed. Needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attnops.plugins.sglang.views import MHAPoolView, MLAPoolView

PAGE, PAGES = 4, 3


def pool_of(width: tuple[int, ...]) -> SimpleNamespace:
    """As SGLang's pools: every getter returns a view of its own."""
    pool = SimpleNamespace(dtype=torch.bfloat16, start_layer=0, device="cpu", asked=0)
    pool.memory = {kind: [torch.randn(PAGES * PAGE + 1, *width).bfloat16() for _ in range(2)] for kind in "kv"}

    def get(kind: str, layer_id: int) -> torch.Tensor:
        pool.asked += 1
        return pool.memory[kind][layer_id].view(torch.bfloat16)

    pool.get_key_buffer = lambda layer_id: get("k", layer_id)
    pool.get_value_buffer = lambda layer_id: get("v", layer_id)
    pool.get_kv_buffer = lambda layer_id: (get("k", layer_id), get("v", layer_id))
    return pool


@pytest.mark.parametrize("latent", [False, True])
def test_pages_follow_the_pool(latent):
    pool = pool_of((1, 576) if latent else (2, 64))
    view = (MLAPoolView if latent else MHAPoolView)(pool, PAGE)
    get = view.get_latent_buffer if latent else lambda layer_id: view.get_kv_buffer(layer_id)[0]
    first = get(0)
    assert first.shape[:2] == (PAGES, PAGE)
    asked = pool.asked
    assert get(0) is first and pool.asked > asked  # the getter waits for a layer's load, so it is asked
    assert get(1) is not first and get(1).data_ptr() == pool.memory["k"][1].data_ptr()
    pool.memory["k"][0] = pool.memory["k"][0].clone()
    assert get(0).data_ptr() == pool.memory["k"][0].data_ptr() != first.data_ptr()


def test_values_of_another_place_make_views_again():
    pool = pool_of((2, 64))
    view = MHAPoolView(pool, PAGE)
    first = view.get_kv_buffer(0)
    pool.memory["v"][0] = pool.memory["v"][0].clone()
    assert view.get_kv_buffer(0)[1].data_ptr() != first[1].data_ptr()
