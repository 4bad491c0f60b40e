"""How far captures are: a bar where there is a terminal and tqdm, a callback, or nothing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator

# progress(captures done, captures in all, size of the last)
Progress = Callable[[int, int, int], None]


@contextlib.contextmanager
def reporting(progress: Progress | bool, total: int, what: str) -> Iterator[Progress]:
    """Gives what is called after each capture.

    Args:
        progress: True: a tqdm bar on a terminal's stderr, where tqdm is installed. False: nothing. Or a callback.
        what: What is captured, for the bar.
    """
    if callable(progress):
        yield progress
    elif not progress or importlib.util.find_spec("tqdm") is None:
        yield lambda done, total, size: None
    else:
        tqdm = importlib.import_module("tqdm").tqdm  # only now: importing attnops.graphs costs nothing for it
        with tqdm(total=total, desc=f"capturing {what}", leave=False, disable=None) as bar:

            def step(done: int, total: int, size: int) -> None:
                bar.set_postfix_str(f"size {size}")
                bar.update(done - bar.n)

            yield step
