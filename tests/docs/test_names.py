"""Files and tests that the pages for contributors name exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/adding_a_kernel.md", "docs/architecture.md", "CONTRIBUTING.md")
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:cuh?|h|cpp|py|md)")  # with a folder, or with an ending
# What a reader makes by the page, and names of commits and results that git does not hold.
MADE = re.compile(r"scale_rows|^build/")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def named(page: str) -> list[str]:
    """What stands in backticks alone, outside of fences."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return sorted(set(re.findall(r"`([^`\n]+)`", text)))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page, tracked):
    """A path may begin in any folder: `cuda/launch.cu` is one of some family."""
    paths = [name.rstrip("/") for name in named(page) if FILE.fullmatch(name) and not MADE.search(name)]
    assert len(paths) > 5
    missing = [path for path in paths if not any(f"/{path}/" in f"/{name}/" for name in tracked)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page, tracked):
    functions = [name for name in named(page) if re.fullmatch(r"test_\w+", name)]
    sources = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in tracked if re.search(r"/test_\w+\.py$", name)
    )
    assert not [name for name in functions if f"def {name}(" not in sources]
