"""SGLang's pools as pages: views are kept, and made again where a layer's memory has changed. Needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attnops.plugins.sglang.views import MHAPoolView, MLAPoolView, pool_view

PAGE, PAGES = 4, 3


def named(name: str, **members) -> SimpleNamespace:
    """An object of a class that is called `name`."""
    return type(name, (SimpleNamespace,), {})(**members)


def pool_of(width: tuple[int, ...], name: str = "MHATokenToKVPool") -> SimpleNamespace:
    """As SGLang's pools: every getter returns a view of its own."""
    pool = named(name, dtype=torch.bfloat16, start_layer=0, layer_num=2, device="cpu", asked=0)
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


def test_a_windows_pool_is_two_pools_and_a_mapping():
    """As of SGLang's `SWAKVPool`: layer 0 sees all, layers 1 and 2 a window. Its allocator maps slots in place."""
    full, window = pool_of((2, 64)), pool_of((2, 64))
    pool = named(
        "SWAKVPool",
        full_kv_pool=full,
        swa_kv_pool=window,
        dtype=torch.bfloat16,
        full_to_swa_index_mapping=None,
        layers_mapping={0: (0, False), 1: (0, True), 2: (1, True)},
    )
    pool.get_kv_buffer = lambda layer_id: (window if layer_id else full).get_kv_buffer(pool.layers_mapping[layer_id][0])
    view = pool_view(pool, PAGE, is_mla=False)
    assert [view.is_windowed(layer) for layer in (0, 1, 2)] == [False, True, True]
    places = {view.get_kv_buffer(layer)[0].data_ptr() for layer in (0, 1, 2)}
    assert places == {full.memory["k"][0].data_ptr(), *(k.data_ptr() for k in window.memory["k"])}
    with pytest.raises(RuntimeError, match="before its allocator is made"):
        _ = view.slot_map
    pool.full_to_swa_index_mapping = torch.arange(PAGE * PAGES)
    assert view.slot_map is pool.full_to_swa_index_mapping


def test_other_pools_and_layouts_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="serves no MHATokenToKVPoolFP4"):
        pool_view(pool_of((2, 64), "MHATokenToKVPoolFP4"), PAGE, is_mla=False)
    pool = pool_of((2, 64))
    with pytest.raises(NotImplementedError, match="serves no MHATokenToKVPool"):
        pool_view(pool, PAGE, is_mla=True)
    pool.kv_cache_layout = "hnd"
    with pytest.raises(NotImplementedError, match="layout nhd, got hnd"):
        pool_view(pool, PAGE, is_mla=False)
    windows = named("SWAKVPool", full_kv_pool=pool_of((1, 576), "MLATokenToKVPool"), swa_kv_pool=pool)
    with pytest.raises(NotImplementedError, match="SWAKVPool of MLATokenToKVPool"):
        pool_view(windows, PAGE, is_mla=False)
