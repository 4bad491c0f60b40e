"""The demo as a user runs it, with few tokens; and that it ends with an error when a page is spoiled."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo

FEW = ["--device", "cpu", "--requests", "3", "--max-new-tokens", "6"]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_serves_and_checks(kind, capfd):
    assert demo.main([*FEW, "--models", kind, "--no-encoder"]) == 0
    out, _ = capfd.readouterr()
    assert "[1] the captain: prompt of 1170 bytes" in out
    assert re.search(r"check +all 16 tokens are those of plain PyTorch", out)
    assert re.search(r"prefixes +1024 of 2841 prompt tokens came from the cache", out)
    assert re.search(r"backend +\w+: the first in order of preference", out)
    assert "\r" not in out, "a log gets whole lines"


def test_serves_in_compiled_pieces(capfd):
    torch._dynamo.reset()
    few = ["--device", "cpu", "--requests", "1", "--max-new-tokens", "4", "--chunk", "128", "--models", "gqa"]
    assert demo.main([*few, "--no-encoder", "--graphs", "piecewise"]) == 0
    out, _ = capfd.readouterr()
    assert re.search(r"graphs +every step runs in pieces compiled by 'eager' around eager attention; \d+ sizes in", out)
    assert re.search(r"check +all 4 tokens are those of plain PyTorch", out)
    assert len(re.findall(r"a step of the model takes \d+\.\d+ ms", out)) == 2


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_spoiled_page_is_an_error(kind, capfd):
    assert demo.main([*FEW, "--models", kind, "--no-encoder", "--quiet", "--corrupt-page"]) == 1
    out, err = capfd.readouterr()
    assert re.search(r"CHECK FAILED: request 1, output token 1 \(position 1171\): served \d+ .* plain PyTorch \d+", err)
    assert "has been checked" not in out


def test_a_backend_that_cannot_serve_says_why(capfd):
    assert demo.main([*FEW, "--backend", "fa4"]) == 2
    _, err = capfd.readouterr()
    assert re.search(r"fa4 does not serve this model here: .*These would: .*torch_native", err)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--backend", "nonsense"], "--backend must be one of auto, .*torch_native"),
        (["--device", "cpu", "--graphs", "full"], "--graphs full records CUDA graphs, .* use piecewise or off"),
        (["--device", "cpu", "--graphs", "segments"], "--graphs segments records CUDA graphs, .* use piecewise or off"),
        (["--compiler", "inductor"], "--compiler inductor compiles pieces: it needs --graphs piecewise"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--max-new-tokens", "2000"], "--max-new-tokens must be from 1 to 8"),
        (["--pool-tokens", "100"], "--pool-tokens must be at least 2048"),
        (["--chunk", "8"], "--chunk must be at least --max-batch"),
    ],
)
def test_options_that_fit_no_run(option, message, capfd):
    with pytest.raises(SystemExit):
        demo.main(option)
    assert re.search(message, capfd.readouterr().err)
