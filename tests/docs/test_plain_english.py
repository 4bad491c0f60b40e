"""Sentences are short where people read them, and the check that says so finds long ones in every kind of text."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = "This sentence has many more words than anybody wants to read at once, " * 2 + "and so it is found"


@pytest.fixture
def plain_english(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = __import__("plain_english")
    yield module
    sys.modules.pop("plain_english")


def test_no_sentence_is_longer_than_25_words(plain_english):
    found = plain_english.too_long([])
    assert not found, "\n".join(f"{one.path}:{one.line}: {one.words} words: {one.text}" for one in found)
    assert len(plain_english.EXCEPTIONS) <= 20


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", f"# Title\n\nShort. {LONG}.\n"),
        ("a.md", f"- an item\n- {LONG}\n"),
        ("a.md", f"| a | b |\n| --- | --- |\n| x | {LONG} |\n"),
        ("a.py", f'"""Short.\n\n{LONG}.\n"""\n'),
        ("a.py", f'def f(x):\n    """Short.\n\n    Args:\n        x: {LONG}.\n    """\n'),
        ("a.py", f'def f(x):\n    raise ValueError(f"{LONG} {{x}}")\n'),
        ("a.py", f'def f(x):\n    require(x, "{LONG[:80]}"\n        "{LONG[80:]}")\n'),
        ("a.cpp", f'void f() {{ fail(op, "{LONG[:60]}"\n  "{LONG[60:]}"); }}\n'),
        ("a.cuh", f'void f() {{\n  const char* text = "{LONG[:60]}"\n  "{LONG[60:]}"; }}\n'),
        ("a.cu", f'if (x) throw std::runtime_error("{LONG}");\n'),
    ],
)
def test_a_long_sentence_is_found(plain_english, monkeypatch, tmp_path, name, text):
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert any(one.words > plain_english.MOST_WORDS for one in plain_english.sentences_of(tmp_path / name))


def test_code_tables_and_short_sentences_pass(plain_english, monkeypatch, tmp_path):
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    words = "one two three four five six seven eight nine"
    text = f"{words}. `{LONG}` is a word. {words}, {words}.\n\n```\n{LONG}\n```\n\n| {words} | {words} | {words} |\n"
    (tmp_path / "a.md").write_text(text)
    assert all(one.words <= plain_english.MOST_WORDS for one in plain_english.sentences_of(tmp_path / "a.md"))
