"""The demo as a user runs it, with few tokens; and that it ends with an error when a page is spoiled."""

import re
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_spoiled_page_is_an_error(kind, capfd):
    assert demo.main([*FEW, "--models", kind, "--no-encoder", "--quiet", "--corrupt-page"]) == 1
    out, err = capfd.readouterr()
    assert re.search(r"CHECK FAILED: request 1, output token 1 \(position 1171\): served \d+ .* plain PyTorch \d+", err)
    assert "has been checked" not in out


def test_a_backend_that_cannot_serve_says_why():
    with pytest.raises(NotImplementedError, match=r"fa4 does not serve this model here: .*These would: .*torch_native"):
        demo.main([*FEW, "--backend", "fa4"])
