"""Runs cases of a seed, in processes that may die.

python -m tests.fuzz --seed 7 --seconds 60            as many cases as fit
python -m tests.fuzz --seed 7 --cases 20000 --jobs 2  so many
python -m tests.fuzz --seed 7 --cases 20000 --seconds 300 --state seed7.json   the same in pieces, one after the other
python -m tests.fuzz --seed 7 --case 1234             one, here: what a failure's line asks for
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
if importlib.util.find_spec("attnops") is None:
    sys.path.insert(0, str(ROOT / "python"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--cases", type=int, help="stop after so many that count")
    parser.add_argument("--case", type=int, help="run this one in this process")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="families, with commas between them")
    parser.add_argument("--prefix", default="", help="of each process: a tool to run it under")
    parser.add_argument("--failures", type=int, default=20, help="stop after so many")
    parser.add_argument("--partial", action="store_true", help="what is never hit is no failure")
    parser.add_argument("--state", type=Path, help="a file: the run goes on from it where it exists, and writes it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = _parser().parse_args()
    only = tuple(name for name in options.only.split(",") if name)
    if only and not options.serve:
        from .cases import FAMILIES

        if unknown := set(only) - FAMILIES.keys():
            sys.exit(f"--only: no family is called {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if options.serve:
        from .child import serve

        serve(options.seed, options.device, only)
        return
    if options.case is not None:
        from .cases import run_case

        result = run_case(options.seed, options.case, options.device, only)
        print(f"{result.status}: {result.family}: {result.message}")
        print(", ".join(result.seen))
        sys.exit(result.status == "failed")
    if options.cases is None and options.seconds is None:
        sys.exit("say --cases or --seconds, or both")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from .runner import Run

    run = Run(options.seed, options.device, options.jobs, only, options.prefix.split())
    run.on_failure = functools.partial(print, "FAILED", flush=True)  # a long run may be cut off
    if options.state and options.state.exists():
        run.load(options.state)
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(run, "stopped", True))  # it still reports

    def keep() -> None:
        print(run.summary(), flush=True)
        if options.state:
            run.save(options.state)

    run.on_progress = keep
    run.work(options.cases, options.seconds, options.failures)
    if options.state:
        run.save(options.state)
    print(run.report(), flush=True)
    sys.exit(bool(run.failures or (run.never_hit() and not options.partial)))


if __name__ == "__main__":
    main()
