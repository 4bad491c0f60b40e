"""What backend flex_attention asks of torch's compiler on a GPU: a tile for every width, nothing left to its choice."""

from __future__ import annotations

import warnings

import pytest
import torch
from attnops.backends import flex_attention, get_backend_class
from attnops.types import AttentionSpec
from steps import LIMITS

SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes that a block may have, by sm


def gqa(head_dim: int, v_head_dim: int | None = None) -> AttentionSpec:
    return AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim or head_dim)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_tiles_fit_the_gpus_that_they_are_for(arch):
    most = 576 if arch in (90, 100) else 512
    for dim in range(16, 577):
        reason = flex_attention._reason_against(gqa(dim), SHARED_MEMORY[arch])
        assert (not reason) == (dim <= most), (dim, reason)
    assert (not flex_attention._reason_against(AttentionSpec.mla(16), SHARED_MEMORY[arch])) == (arch in (80, 90, 100))


def test_options_leave_nothing_to_torchs_choice(monkeypatch):
    for hip in (None, "7.0"):
        monkeypatch.setattr(torch.version, "hip", hip)
        for dim, rows in ((16, 64), (64, 64), (65, 32), (256, 32), (257, 16), (576, 16)):
            for q_dim, v_dim in ((dim, dim), (dim, 16), (16, dim)):  # the wider of the two decides
                options = flex_attention._kernel_options(torch.empty(1, 1, 1, q_dim), torch.empty(1, 1, 1, v_dim))
                assert options["BLOCK_M"] == options["BLOCK_N"] == rows and 128 % rows == 0
                assert (options["num_stages"], options["num_warps"]) == (1, 4)
                assert options["FORCE_USE_FLEX_ATTENTION"]
                assert options.get("FLOAT32_PRECISION") == (None if hip else "'tf32x3'")


def test_rows_that_a_gpus_kernel_does_not_take_are_refused(monkeypatch):
    cls, small = get_backend_class("flex_attention"), gqa(8)
    assert cls(small, LIMITS).device.type == "cpu"
    monkeypatch.setattr(flex_attention, "_shared_memory", lambda device: SHARED_MEMORY[86])
    monkeypatch.setattr(flex_attention.GatheredBackend, "__init__", lambda self, spec, limits, device: None)
    monkeypatch.setattr(cls, "device", torch.device("cuda"), raising=False)
    with pytest.raises(NotImplementedError, match="takes 16 dimensions and more on a GPU, got head_dim/v_head_dim 8/8"):
        cls(small, LIMITS, "cuda")
    with pytest.raises(
        NotImplementedError, match=r"needs 163840 bytes of shared memory for .* 576/512, this GPU has 101"
    ):
        cls(AttentionSpec.mla(16), LIMITS, "cuda")
    cls(gqa(128), LIMITS, "cuda")


def test_the_compiler_takes_the_options():
    """Whether torch knows them: a name that it does not know is an error where the function is wrapped."""
    assert callable(flex_attention._compiled(("options",)))


def test_no_call_runs_uncompiled():
    """More shapes than torch keeps for a function: each is compiled, and the user is told once that some are anew."""
    ran = []

    def backend(graph, inputs):
        ran.append(graph)
        return graph.forward

    one = flex_attention._Compiled(("a kind",), backend=backend, dynamic=False)
    other = flex_attention._Compiled(("another kind",), backend=backend, dynamic=False)
    options = {"scale": 1.0, "return_aux": None, "kernel_options": None}
    rows = [torch.randn(1, 1, n, 16) for n in range(2, 8)]
    with warnings.catch_warnings(record=True) as said, torch._dynamo.config.patch(recompile_limit=2):
        warnings.simplefilter("always")
        for call, tensors in ((one, rows[:2]), (other, rows[:2]), (one, rows)):
            for q in tensors:
                before = len(ran)
                # torch's own flex_attention, uncompiled, would share what it keeps with the tests before.
                expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=1.0)
                torch.testing.assert_close(call(q, q.clone(), q.clone(), None, None, options), expected)
                assert call is one or len(ran) == before + 1
    texts = [str(w.message) for w in said if issubclass(w.category, RuntimeWarning)]
    assert len(texts) == 1 and "for ('a kind',)" in texts[0] and "recompile_limit" in texts[0]
    assert (one.made, other.made, len(ran)) == (3, 1, 8)
