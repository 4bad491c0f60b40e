"""What `python -m attnops.info` says, and what an import costs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attnops import info
from attnops.backends import Machine, get_backend_class, registered_names
from attnops.plugins import ENGINES, Engine
from attnops.types import AttentionSpec
from problems import paged_problem
from xqa_decoding import decode

ROOT = Path(__file__).parents[1]


def printed(capsys, main, *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def test_everything_that_is_loaded_is_named(capsys):
    text = printed(capsys, info.main, "--device", "cpu")
    assert f"kernels for {torch.ops.attnops.cpu_isa()}" in text
    for name in [*registered_names(), "unified_attention_with_output", "store_kv"]:
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name
    assert re.search(r"^  store_kv +CPU", text, re.MULTILINE)


def test_rows_of_kernel_tables_are_counted(monkeypatch):
    monkeypatch.setenv("ATTNOPS_CPU_ISA", "scalar")
    problem = paged_problem([3])
    decode(problem)
    row = "cpu xqa_decode scalar_bfloat16"
    before = info.kernel_counts()[row]
    decode(problem)
    assert info.kernel_counts()[row] == before + 1


def test_plugins_names_every_engine_with_its_version_or_the_reason(capsys, monkeypatch):
    text = printed(capsys, info.main, "--plugins")
    for name, engine in ENGINES.items():
        assert re.search(rf"^{name} +\S", text, re.MULTILINE) and engine.option in text
        assert all(f"  refused      {what}: {why}" in text for what, why in engine.refused)
    assert "  its own      layers of other head sizes, by TRITON_ATTN" in text
    monkeypatch.setattr(Engine, "installed", lambda self: ("peer", "0.0.1.dev2"))
    assert re.search(r"peer 0\.0\.1\.dev2 is not served: attnops serves \d", printed(capsys, info.main, "--plugins"))


def test_plugins_says_of_each_adapter_what_it_serves_and_refuses(monkeypatch):
    """By capabilities: where one of them changes, so does the text."""
    from attnops.backends.decode_backends import TRTLLMHAAttnBackend, TRTLLMMLABackend

    def of(name: str) -> list[str]:
        lines = info.describe_plugins()
        begin = lines.index(f"  {name}") + 1
        return list(itertools.takewhile(lambda line: line.startswith("    "), lines[begin:]))

    gqa, mla = of("ATTNOPS"), of("ATTNOPS_MLA")
    assert "cache as q, e4m3;" in gqa[0] and "page size any" in gqa[0] and "sinks yes" in gqa[0]
    assert "GPUs of sm_90; q bf16, fp16; cache as q, e4m3; page size any" in mla[0] and "sinks" not in mla[0]
    assert "also q fp32" in mla[0] and "also" not in gqa[0], "on a CPU"
    refused = [line.removeprefix("    refuses    ") for line in (*gqa[1:], *mla[1:])]
    taken = "takes a cache of the model's dtype, e4m3, got e5m2"
    assert f"a cache of e5m2: {taken} (of vLLM's caches attnops reads those of e4m3, a scale per tensor)" in refused
    assert "a head dim of 20: takes head_dim/v_head_dim 32-256 in steps of 8 (equal), got 20/20" in refused
    assert "sinks: has no attention sinks (the adapter passes none)" in refused
    assert "q of float32: takes bf16, fp16, got fp32" in refused

    changed = dataclasses.replace(TRTLLMHAAttnBackend.capability, sinks=False, page_sizes=frozenset({64}))
    monkeypatch.setattr(TRTLLMHAAttnBackend, "capability", changed)
    changed = dataclasses.replace(TRTLLMMLABackend.capability, dtypes=frozenset({torch.float32}))
    monkeypatch.setattr(TRTLLMMLABackend, "capability", changed)
    gqa, mla = of("ATTNOPS"), of("ATTNOPS_MLA")
    assert "sinks" not in gqa[0] and "page size 64" in gqa[0] and "q fp32" in mla[0]
    assert "    refuses    sinks: has no attention sinks" in gqa, "for a reason of the kernels', none of the adapter's"
    assert "    refuses    pages of 16: takes page_size 64, got 16" in gqa
    assert not any("q of float32" in line for line in mla)


def test_what_an_adapter_changes_differs_from_its_backends_and_has_a_reason():
    from attnops.plugins.adapters import ADAPTERS

    assert set(ADAPTERS) == set(ENGINES)
    for adapter in itertools.chain(*ADAPTERS.values()):
        served, whole = adapter.capability(), dataclasses.replace(adapter, own={}).capability()
        for name, (value, why) in adapter.own.items():
            assert getattr(served, name) == value != getattr(whole, name) and why, f"{adapter.name}: {name}"


def test_a_model_that_nothing_serves_gets_the_reasons(capsys):
    text = printed(capsys, info.main, "--device", "cpu", "--head-dim", "1024")
    assert "no backend serves this model" in text and "takes head_dim/v_head_dim" in text


def test_a_model_on_another_machine_gets_its_reasons():
    spec = AttentionSpec.mla(128)
    lines = info.describe_selection(spec, Machine(device="cuda", arch=100), speculative=True)
    assert any("not flashinfer: needs the package flashinfer-python, which is not installed" in line for line in lines)


def test_mistakes_of_the_command_line_are_named(capsys):
    with pytest.raises(SystemExit):
        info.main(["--num-q-heads", "7", "--num-kv-heads", "2"])
    assert "must be a multiple" in capsys.readouterr().err


def test_the_matrix_has_a_column_per_backend_and_is_that_of_the_book():
    matrix = info.support_matrix()
    lines = matrix.splitlines()
    assert all(line.count("|") == len(registered_names()) + 2 for line in lines)
    for name in registered_names():
        assert f"`{name}`" in lines[0]
    mla = next(line for line in lines if line.startswith("| MLA"))
    expected = ["yes" if get_backend_class(name).capability.mla else "-" for name in registered_names()]
    assert [cell.strip() for cell in mla.split("|")[2:-1]] == expected
    assert matrix in (ROOT / "docs/choosing.md").read_text(), (
        "docs/choosing.md: paste what `python -m attnops.info --matrix` prints"
    )


def test_an_import_costs_little_beyond_torch():
    program = "import time, torch; t = time.process_time(); import attnops; print(time.process_time() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.3
