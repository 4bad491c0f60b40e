"""What `import attnops` costs beyond `import torch`: fresh interpreters, median of several."""

import statistics
import subprocess
import sys

from records import Record, write

PROGRAM = "import time, torch; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(rounds: int = 7) -> None:
    times = sorted(seconds("import attnops") for _ in range(rounds))
    middle = statistics.median(times)
    print(f"import attnops, beyond torch: {middle:.3f} s (of {rounds}: {times[0]:.3f} to {times[-1]:.3f})")
    write([Record("import", "attnops", {"rounds": rounds}, ms=middle * 1e3)], "cpu-import")


if __name__ == "__main__":
    main()
