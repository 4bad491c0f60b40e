"""Prompts of ATTNOPS_MLA: attnops among vLLM's MLA prefill backends, against float64, and the choice of it."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from attnops.plugins import unsupported
from checks import MAX_RELATIVE_ERROR, relative_error

pytestmark = pytest.mark.skipif(bool(unsupported("vllm")), reason=unsupported("vllm") or "-")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYER = {"num_heads": 4, "scale": 0.07, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DIMS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def made(v_head_dim: int = 128, dtype: torch.dtype = torch.bfloat16):
    from attnops.plugins.vllm.mla_prompts import AttnopsPrefillBackend

    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    return AttnopsPrefillBackend(**LAYER, v_head_dim=v_head_dim, vllm_config=config)


def exact(q, k, v, queries, keys, causal):
    """Each request's queries over its keys, in float64: ``[T, H, D_v]`` and the log of the sums, ``[H, T]``."""
    outs, sums = [], []
    for rows, others in zip(q.double().split(queries), range(len(keys)), strict=True):
        begin = sum(keys[:others])
        k_rows, v_rows = (x.double()[begin : begin + keys[others]] for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", rows, k_rows) * LAYER["scale"]
        if causal:
            scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_rows))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("into", [False, True], ids=["allocated", "out"])
def test_new_tokens_and_chunks_of_what_was_stored(into, device):
    """v is a slice of a projection, as vLLM has it. Every layer of a step repeats its plans; a new step has others."""
    backend = made().clone()
    assert backend.get_name() == "ATTNOPS" and backend.supports_out()
    for queries, stored in (([5, 70, 1], [40, 0, 130]), ([64, 33], [7, 90])):
        bounds = torch.tensor([0, *queries]).cumsum(0).int()
        q = torch.randn(sum(queries), 4, 192).bfloat16()
        backend.prepare_metadata(SimpleNamespace(query_start_loc=bounds.to(device)))
        for _ in range(2):
            k = torch.randn(sum(queries), 4, 192).bfloat16()
            v = torch.randn(sum(queries), 4, 256).bfloat16()[..., 128:]
            out = torch.empty(sum(queries), 4, 128).bfloat16().to(device) if into else None
            given = [x.to(device) for x in (q, k, v)]
            expected, sums = exact(q, k, v, queries, queries, True)
            got = backend.run_prefill_new_tokens(*given, return_softmax_lse=False, out=out)
            assert isinstance(got, torch.Tensor) and (out is None or got is out)
            assert relative_error(got.cpu(), expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
            got, lse = backend.run_prefill_new_tokens(*given, return_softmax_lse=True)
            assert relative_error(got.cpu(), expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]
            assert lse.is_contiguous()
            torch.testing.assert_close(lse.cpu().double(), sums, atol=2e-3, rtol=0)
            for index, part in enumerate((stored, stored[:1])):  # the second chunk has the first request alone
                count, rows = len(part), sum(queries[: len(part)])
                places = torch.tensor([0, *part]).cumsum(0).int().to(device)
                chunk = SimpleNamespace(index=index, query_start_loc=bounds[: count + 1].to(device), cu_seq_lens=places)
                k, v = torch.randn(sum(part), 4, 192).bfloat16(), torch.randn(sum(part), 4, 128).bfloat16()
                out = torch.empty(rows, 4, 128).bfloat16().to(device) if into else None
                got, lse = backend.run_prefill_context_chunk(chunk, *(x.to(device) for x in (q[:rows], k, v)), out=out)
                expected, sums = exact(q[:rows], k, v, queries[:count], part, False)
                seen = (torch.tensor(part) > 0).repeat_interleave(torch.tensor(queries[:count]))
                assert relative_error(got.cpu()[seen], expected[seen]) <= MAX_RELATIVE_ERROR[torch.bfloat16]
                torch.testing.assert_close(lse.cpu()[:, seen].double(), sums[:, seen], atol=2e-3, rtol=0)
                assert (lse.cpu()[:, ~seen] == -torch.inf).all(), "vLLM merges what saw nothing with no weight"


def test_a_quantized_output_is_refused():
    backend = made()
    assert not backend.supports_quant_output(None)
    with pytest.raises(NotImplementedError, match="does not quantize its output"):
        backend.run_prefill_new_tokens(None, None, None, False, output_scale=torch.ones(1))


@pytest.fixture
def hopper(monkeypatch, caplog):
    """vLLM on an H200, as far as a choice goes."""
    from attnops.backends import Machine
    from attnops.plugins import vllm as plugin
    from attnops.plugins.vllm import mla_prompts

    assert plugin.register()
    here = Machine(device="cuda", arch=90, has_cuda_kernels=True, built_archs=frozenset({90}))
    monkeypatch.setattr(mla_prompts, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_type="cuda"))
    monkeypatch.setattr(mla_prompts, "detect_machine", lambda device: here)
    mla_prompts._say.cache_clear()
    caplog.set_level(logging.INFO, "attnops")
    return mla_prompts


def config(named=None, dtype=torch.bfloat16):
    from vllm.config import AttentionConfig

    attention = AttentionConfig(mla_prefill_backend=named)
    return SimpleNamespace(attention_config=attention, model_config=SimpleNamespace(dtype=dtype))


def test_prompts_on_a_gpu_go_to_fmha(hopper, caplog):
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    given = config()
    for _ in range(3):  # each layer asks
        hopper.choose(given, 192, 128)
    assert given.attention_config.mla_prefill_backend is MLAPrefillBackendEnum["ATTNOPS"]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["attnops: prompts of MLA go to fmha, by the MLA prefill backend ATTNOPS"]
    chosen = MLAPrefillBackendEnum["ATTNOPS"].get_class()
    assert chosen is hopper.AttnopsPrefillBackend
    asked = MLAPrefillSelectorConfig(dtype=torch.bfloat16, mla_dimensions=MLADimensions(**DIMS))
    assert chosen.validate_configuration(DeviceCapability(9, 0), asked) == []
    odd = MLAPrefillSelectorConfig(dtype=torch.bfloat16, mla_dimensions=MLADimensions(**DIMS | {"v_head_dim": 20}))
    (reason,) = chosen.validate_configuration(DeviceCapability(9, 0), odd)
    assert "v_head_dim=20" in reason


@pytest.mark.parametrize(
    "dims, dtype, named, reason",
    [
        ((192, 20), torch.bfloat16, None, "takes head_dim/v_head_dim 32-256 in steps of 8, got 192/20"),
        ((192, 128), torch.float64, None, "takes bf16, fp16, fp32, got torch.float64"),
        ((192, 128), torch.bfloat16, "FLASH_ATTN", "mla_prefill_backend is FLASH_ATTN"),
    ],
    ids=["dims", "dtype", "named"],
)
def test_what_fmha_does_not_serve_is_vllms_own_and_the_log_says_why(dims, dtype, named, reason, hopper, caplog):
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    member = MLAPrefillBackendEnum[named] if named else None
    given = config(member, dtype)
    for _ in range(2):
        hopper.choose(given, *dims)
    assert given.attention_config.mla_prefill_backend is member, "nobody's option is changed"
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"attnops: prompts of MLA go to an MLA prefill backend of vLLM's own: {reason}"]


def test_another_gpu_keeps_vllms_own(hopper, caplog, monkeypatch):
    from attnops.backends import Machine

    monkeypatch.setattr(hopper, "detect_machine", lambda device: Machine(device="cuda", arch=90))
    given = config()
    hopper.choose(given, 192, 128)
    assert given.attention_config.mla_prefill_backend is None and not hopper.AttnopsPrefillBackend.is_available()
    assert "needs the compiled CUDA kernels, which are not loaded" in caplog.records[0].getMessage()


def test_on_a_cpu_the_variable_decides(hopper, caplog, monkeypatch):
    """There vLLM validates nothing, and asks for no option: what is not served must be its own class."""
    from attnops.backends import Machine

    monkeypatch.setattr(hopper, "current_platform", SimpleNamespace(is_cpu=lambda: True, device_type="cpu"))
    monkeypatch.setattr(hopper, "detect_machine", lambda device: Machine(device="cpu"))
    monkeypatch.delenv("ATTNOPS_VLLM_CPU", raising=False)
    given = config()
    hopper.choose(given, 192, 128)
    assert given.attention_config.mla_prefill_backend is None
    assert "vLLM's own: ATTNOPS_VLLM_CPU=1 is not set" in caplog.records[0].getMessage()
    assert type(made()).__name__ == "AttnopsPrefillBackend"
    assert type(made(v_head_dim=20)).__name__ == "CPUSDPAMLAPrefillBackend"


def test_the_name_reaches_a_process_that_has_loaded_no_plug_in(hopper):
    """As those of the backends: vLLM's configuration holds it, and is pickled."""
    from attnops.plugins import vllm as plugin
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    member = MLAPrefillBackendEnum["ATTNOPS"]
    assert pickle.loads(pickle.dumps(member)) is member is plugin.prefill_backend_named("ATTNOPS")
    assert b"prefill_backend_named" in pickle.dumps(member)
