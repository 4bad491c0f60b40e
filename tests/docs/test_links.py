"""Links between the texts of the repository lead somewhere. Sphinx checks those of the book once more."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {"_generated"}  # by `make docs`


def texts() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if (ROOT / name).exists()]


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", texts())
def test_links_lead_somewhere(name):
    path = ROOT / name
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        if MADE & set(Path(file).parts):
            continue
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name}: {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name}: {target}"


@pytest.mark.parametrize("name", texts())
def test_a_row_of_a_table_is_one_line(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = [line for line in text.splitlines() if line.startswith("|") and not line.rstrip().endswith("|")]
    assert not broken


def test_links_of_a_built_book_are_checked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    (tmp_path / "a.html").write_text('<a href="b.html#here"><a href="#top"><img src="https://x/y.png"><p id="top">')
    (tmp_path / "b.html").write_text('<p id="here">')
    check = __import__("check_book")
    assert check.broken_links(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="a.html#nowhere"><img src="none.svg">')
    assert len(check.broken_links(tmp_path)) == 3
