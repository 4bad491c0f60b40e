"""Messages of the page on troubleshooting are messages of the code, as far as they are fixed text."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def literals() -> str:
    """Text of the sources, in which strings that are written in parts are whole."""
    files = [*(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "setup.py"])
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("message", re.findall(r"^\*\*`(.+?)`\*\*", PAGE, re.MULTILINE))
def test_a_message_is_said_somewhere(message, literals):
    fragments = re.split(r"\.\.\.|\.shape\[\d\]|\([a-z_]+\)|\d+|`|:|k_pages|v_pages|out_partial", message)
    fragments = [fragment.strip(" ,()=") for fragment in fragments]
    spoken = [fragment for fragment in fragments if len(fragment.split()) >= 2]
    assert spoken, "a message that is all placeholders helps nobody"
    for fragment in spoken:
        assert fragment in literals, fragment
