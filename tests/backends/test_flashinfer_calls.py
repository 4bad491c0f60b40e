"""Layers of a step repeat the first one's call of FlashInfer's compiled module, and nothing else is left out."""

from __future__ import annotations

import pytest
import torch
from attnops.backends.flashinfer_calls import record_run


class Wrapper:
    """As FlashInfer's: `run` checks, gathers, and calls its module."""

    class Module:
        version = 1

        def __init__(self) -> None:
            self.seen = []

        def paged_run(self, *arguments, **options) -> None:
            self.seen.append((arguments, options))

    def __init__(self) -> None:
        self._cached_module = self.Module()

    def run(self, q, pages, out) -> None:
        assert self._cached_module.version == 1
        self._cached_module.paged_run("plan", q, *pages, out, None, 0.5)


def tensors(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 4, generator=generator) for _ in range(4))


def test_the_call_is_repeated_with_another_layers_tensors():
    wrapper, first, second = Wrapper(), tensors(), tensors(1)
    module = wrapper._cached_module
    repeated = record_run(wrapper, lambda: wrapper.run(first[0], first[1:3], first[3]), first)
    assert wrapper._cached_module is module and len(module.seen) == 1
    assert repeated.takes(second[0], second[3])
    assert not repeated.takes(second[0][:1], second[3]) and not repeated.takes(second[0].half(), second[3])
    assert not repeated.takes(second[0], second[3].half())
    repeated(*second)
    arguments, options = module.seen[1]
    assert [arguments[0], *arguments[5:]] == ["plan", None, 0.5] and not options
    assert all(given is own for given, own in zip(arguments[1:5], second, strict=True))


@pytest.mark.parametrize("way", ["twice", "keyword", "copy", "view", "same tensor twice", "another name", "none"])
def test_a_run_of_another_kind_is_not_repeated(way):
    wrapper, own = Wrapper(), tensors()
    q, k, v, out = own
    run = {
        "twice": lambda m: (m.paged_run(q, k, v, out), m.paged_run(q, k, v, out)),
        "keyword": lambda m: m.paged_run(q, k, v, out=out),
        "copy": lambda m: m.paged_run(q.clone(), k, v, out),
        "view": lambda m: m.paged_run(q, k, v, out, q.view(-1)),
        "same tensor twice": lambda m: m.paged_run(q, k, v, out, out),
        "another name": lambda m: None,
        "none": lambda m: None,
    }[way]
    if way == "none":
        del wrapper._cached_module
    assert record_run(wrapper, lambda: run(getattr(wrapper, "_cached_module", None)), own) is None


def test_an_error_of_the_first_call_leaves_the_module_where_it_was():
    wrapper, own = Wrapper(), tensors()
    module = wrapper._cached_module
    module.version = 2
    with pytest.raises(AssertionError):
        record_run(wrapper, lambda: wrapper.run(own[0], own[1:3], own[3]), own)
    assert wrapper._cached_module is module
