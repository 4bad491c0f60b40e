"""The snippets of the README and of the book run as they stand."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import attnops.compat.flash_attn
import attnops.graphs
import pytest
import torch
from attnops.types import ForwardMode
from graph_hosts import engine_and_batch
from graph_tape import GraphTape

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^python -m (attnops\.\w+)(.*?)(?:  .*)?$", re.MULTILINE)
FENCE = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
# Pages whose snippets have a test of their own, below or elsewhere.
APART = {"docs/graphs.md", "docs/engines.md"}
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```\{code-block\} text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def pages() -> list[str]:
    """README and the pages of the book that have snippets."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [str(path.relative_to(ROOT)) for path in found if BLOCK.search(path.read_text(encoding="utf-8"))]
    return [name for name in names if name not in APART and "_generated" not in name]


def examples(path: str) -> list[tuple[str, str]]:
    """Each snippet, with the output that the page shows below it."""
    return BLOCK.findall((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", pages())
def test_snippets_run_and_print_what_the_page_shows(page, capsys):
    """One namespace per page, as a reader passes through it."""
    names: dict = {}
    torch._dynamo.reset()
    for code, shown in examples(page):
        capsys.readouterr()
        exec(compile(code, page, "exec"), names)
        if shown:
            assert shown.strip() in capsys.readouterr().out


def fences() -> list[tuple[str, str, str]]:
    """(page, language, text) of every fence of README and book."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [(str(path.relative_to(ROOT)), *fence) for path in found for fence in FENCE.findall(path.read_text("utf-8"))]


def commands() -> list[tuple[str, str]]:
    return sorted({(module, rest) for _, _, text in fences() for module, rest in COMMAND.findall(text)})


@pytest.mark.parametrize("module, arguments", commands())
def test_commands_run(module, arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", [module, *shlex.split(arguments)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is there
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert not end.code
    assert capsys.readouterr().out


def test_python_stands_in_fences_that_are_run():
    other = [(page, text) for page, language, text in fences() if language != "python"]
    assert not [page for page, text in other if re.search(r"^\s*(import \w|from \S+ import )", text, re.MULTILINE)]


def test_every_page_with_a_guide_is_tested():
    assert {"README.md", "docs/quickstart.md", "docs/guide/decode_step.md", "docs/guide/serving.md"} <= set(pages())


def test_the_snippet_for_transformers_runs(tmp_path):
    """`attn_implementation="attnops"` on a tiny model."""
    transformers = pytest.importorskip("transformers")
    from attnops.plugins.engines import unsupported

    if unsupported("transformers"):
        pytest.skip(unsupported("transformers"))
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (code,) = [code for code, _ in examples("docs/engines.md") if "transformers" in code]
    names = {
        "path": tmp_path,
        "inputs": {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 2},
    }
    exec(compile(code, "docs/engines.md", "exec"), names)
    assert names["model"].config._attn_implementation == "attnops"


@pytest.mark.parametrize("engine, given", [("vllm", {"attention_backend": "ATTNOPS"}), ("nanovllm", {})])
def test_the_snippets_for_other_engines_run(engine, given, monkeypatch, tmp_path):
    """With a stand-in for the engine; tests/plugins has the engines themselves."""
    calls = []
    monkeypatch.setitem(
        sys.modules, engine, SimpleNamespace(LLM=lambda *args, **options: calls.append((args, options)))
    )
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    (code,) = [code for code, _ in examples("docs/engines.md") if f"from {engine} import" in code]
    exec(compile(code, "docs/engines.md", "exec"), {"path": tmp_path})
    assert calls == [((tmp_path,), given)]
    if engine == "nanovllm":
        assert sys.modules["flash_attn"] is attnops.compat.flash_attn


def test_the_guide_to_graphs_runs_on_the_tape(monkeypatch):
    """All of it in one namespace, as a reader passes through it; a tape takes the place of CUDA graphs."""
    monkeypatch.setattr(attnops.graphs, "CudaGraphs", lambda: GraphTape)
    for module in (attnops.graphs.runner, attnops.graphs.segments):
        monkeypatch.setattr(module, "recorder_for", lambda device, recorder: recorder or GraphTape)
    engine, input_ids, batch = engine_and_batch()
    _, ragged_ids, ragged = engine_and_batch(mode=ForwardMode.DRAFT_EXTEND, counts=(3, 1), ragged=True)
    ragged.token_to_kv_pool, ragged.req_to_token = engine.pool, engine.rows.req_to_token
    names = {
        "torch": torch,
        "model": engine.model,
        "draft_model": lambda ids, positions, batch, hidden_states: engine.model(ids, positions, batch) + hidden_states,
        "backend": engine.backend,
        "req_to_token": engine.rows.req_to_token,
        "token_to_kv_pool": engine.pool,
        "input_ids": input_ids,
        "batch": batch,
        "ragged_ids": ragged_ids,
        "ragged_batch": ragged,
    }
    found = [code for code, _ in examples("docs/graphs.md")]
    assert len(found) == 5
    results = []
    torch._dynamo.reset()
    for example in found:
        exec(compile(example.replace('"inductor"', '"eager"'), "docs/graphs.md", "exec"), names)
        results.append(names.get("logits"))
    assert names["runner"].sizes == (1, 2, 4, 8) and names["verify"].static.tree_mask is not None
    assert names["out"].shape == (4, 61)
    for logits in results[2:]:
        torch.testing.assert_close(logits, results[0])
