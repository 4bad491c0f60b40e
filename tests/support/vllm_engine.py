"""Runs `vllm_program.py`: vLLM's whole engine in a process of its own, with attnops found through its entry point."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import tiny_models

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("vllm_program.py")
LENGTHS = (3, 90, 17, 130, 44, 64)


def declare_packages(place: Path) -> Path:
    """Puts entry points into `place`/site, as wheels would: attnops' own, and a plug-in that counts calls."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = place / "site" / f"attnops-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: attnops\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return declare_counter(place)


def declare_counter(place: Path) -> Path:
    """The plug-in that counts calls, alone: beside a wheel in `place`/site."""
    counter = place / "site" / "counter-1.dist-info"
    counter.mkdir()
    (counter / "METADATA").write_text("Metadata-Version: 2.1\nName: counter\nVersion: 1\n")
    groups = {"vllm.general_plugins": "vllm_program", "sglang.srt.plugins": "sglang_program"}
    points = [f"[{group}]\ncounter = {module}:count_calls\n" for group, module in groups.items()]
    (counter / "entry_points.txt").write_text("\n".join(points))
    return place


@functools.cache
def model_folder(place: Path, kind: str) -> str:
    path = place / kind
    tiny_models.model(kind).save_pretrained(path)
    return str(path)


def run(place: Path, kind: str, options: dict, rounds=1, lengths=LENGTHS, **environment: str) -> dict:
    """The program's result: tokens, logprobs, calls of attnops' ops, backends by name; and the lines of its `log`.

    `options` are those of `LLM`. Where a wheel is installed in `place`/site, this tree's package is not on the path.
    """
    request = {
        "model": model_folder(place, kind),
        "options": options,
        "prompts": [tiny_models.prompts(1, n, seed=n)[0].tolist() for n in lengths],
        "rounds": rounds,
        "max_tokens": 20,
    }
    tree = str(ROOT / "python")
    own = [] if (place / "site/attnops").exists() else [tree]
    others = [path for path in sys.path if not path or os.path.realpath(path) != os.path.realpath(tree)]
    paths = [str(place / "site"), *own, str(PROGRAM.parent), *others]
    passive = {"OMP_WAIT_POLICY": "passive"}  # threads that spin while they wait take the cores of other ranks
    environment = {**passive, **os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    environment["CALLS"] = str(place / "calls")
    Path(environment["CALLS"]).write_text("")
    command = [sys.executable, str(PROGRAM), json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=place)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("RESULT ")) | {"log": done.stderr.splitlines()}


def check_tokens(got: dict, expected: dict) -> int:
    """Tokens are equal, or the first that differs is a choice between two candidates a rounding of bfloat16 apart.

    Returns how many requests are equal to their end.
    """
    gap = 2**-8 * 32  # of logits of some 30
    equal, far = 0, []
    for request, (one, other) in enumerate(zip(got["tokens"][0], expected["tokens"][0], strict=True)):
        first = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        equal += first is None
        if first is not None:
            ours, theirs = (
                best - second for best, second in (run["logprobs"][0][request][first] for run in (got, expected))
            )
            print(f"request {request}, token {first}: two candidates {theirs:.4f} apart, here {ours:.4f}")
            if theirs > gap:
                far.append(f"request {request}, token {first}: {theirs:.4f} apart, here {ours:.4f}")
    assert not far, f"more than {gap} apart: " + "; ".join(far)
    return equal
