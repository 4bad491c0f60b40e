"""The small examples run, and their numbers are right."""

import re
import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_decode_step(capsys):
    names = runpy.run_path(str(EXAMPLES / "decode_step.py"))
    differences = re.findall(r"largest difference to PyTorch (\S+)", capsys.readouterr().out)
    assert len(differences) == 3
    assert all(float(difference) < 2e-2 for difference in differences)
    assert names["out"].abs().max() > 1e-2, "zeros would be close, too"


def test_graph_replay(capsys):
    torch._dynamo.reset()
    names = runpy.run_path(str(EXAMPLES / "graph_replay.py"))
    assert re.search(
        r"pieces on \w+: 20 steps of other requests; relative difference to eager", capsys.readouterr().out
    )
    assert names["eager"].abs().max() > 1e-2, "zeros would be close, too"


def test_chunked_prefill(capsys):
    names = runpy.run_path(str(EXAMPLES / "chunked_prefill.py"))
    assert "256 tokens in chunks of 100, 100 and 56" in capsys.readouterr().out
    assert names["chunked"].shape == (256, 8 * 64)
    assert torch.isfinite(names["whole"]).all()
