"""Whom benchmarks/bench_decode_sampled.py asks for a cell, and that it says so without a GPU."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def contenders(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_DECODE_AUTO_CUDNN"):
        monkeypatch.setenv(name, "1")  # the module sets what is unset
    return importlib.import_module("sampled_contenders")


def cell(contenders, **options):
    shape = {"is_mla": False, "heads": (32, 8), "head_dim": 128, "lengths": (100, 7), "law": "uniform"}
    return importlib.import_module("sampled_cells").Cell(**{**shape, **options})


GQA = {"FA3", "FlashInfer fa2", "FlashInfer cuda-core"}
XQA = {"XQA", "XQA hnd"}
MLA = {"is_mla": True, "heads": (16, 1), "head_dim": 576}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GQA | XQA | {"FlashInfer fa3", "cuDNN"}),
        ({"kv": "fp16", "page_size": 128}, GQA | XQA | {"FlashInfer fa3", "cuDNN"}),
        ({"kv": "e4m3", "heads": (30, 6)}, GQA | XQA),
        ({"head_dim": 192, "page_size": 3}, GQA | {"FlashInfer fa3"}),
        ({"page_size": 1, "window_left": 127}, GQA | {"FlashInfer fa3"}),
        ({"seqlen_q": 4}, GQA - {"FlashInfer cuda-core"} | XQA | {"FlashInfer fa3", "cuDNN"}),
        ({"sinks": True, "window_left": 9}, GQA - {"FlashInfer cuda-core"} | XQA | {"FlashInfer fa3", "cuDNN"}),
        ({**MLA, "kv": "fp16"}, {"FlashMLA", "FA3 qv", "FlashInfer fa2", "FlashInfer fa3"}),
        ({**MLA, "kv": "e4m3", "page_size": 1}, {"FlashInfer fa2", "FlashInfer fa3"}),
    ],
)
def test_every_peer_with_room_for_a_cell_is_asked(contenders, options, expected):
    assert {name for name, _, _ in contenders.peers(cell(contenders, **options))} == expected


@pytest.mark.parametrize("name", ["FA3", "FlashInfer fa3"])
def test_kernels_that_a_pack_lacks_are_refused_before_any_call(contenders, name, monkeypatch):
    monkeypatch.setenv("PEERS_COMMON", "a pack")
    asked = cell(contenders, kv="fp16")
    prepare = next(prepare for who, prepare, _ in contenders.peers(asked) if who == name)
    problem = SimpleNamespace(cell=asked, q=torch.empty(2, 1, 32, 128), q_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="its pack lacks this kernel"):
        prepare(problem)


@pytest.mark.parametrize("seqlen_q", [2, 16, 17, 33])
def test_the_mask_of_drafts_is_causal(contenders, seqlen_q):
    words = contenders.causal_words(3, seqlen_q)
    assert words.shape == (3, seqlen_q, 2 * -(-seqlen_q // 32)) and words.dtype == torch.uint16
    for token, row in enumerate(words[2].tolist()):
        assert sum(word << 16 * i for i, word in enumerate(row)) == (2 << token) - 1


def test_a_dry_run_names_cells_and_contenders(contenders, monkeypatch, capsys):
    bench = importlib.import_module("bench_decode_sampled")
    monkeypatch.setattr(sys, "argv", ["bench", "--dry", "--cells", "3", "--sets", "tokens,mla8,width", "--seed", "5"])
    bench.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if ": attnops" in line]
    assert [line.split(":")[0] for line in lines] == ["tokens"] * 3 + ["mla8"] * 3 + ["width"] * 3
    assert all("FA3" in line for line in lines[:3]) and all("rounded" in line for line in lines[3:6])
    assert all(line.endswith("attnops, exact") for line in lines[6:])
