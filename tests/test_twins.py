"""No two passages of 12 code lines of the decode kernels and of csrc/device differ only in names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("csrc/xqa_decode/sm90", "csrc/mla_decode/sm90", "csrc/device")
LINES = 12
# Where one function for both gave other machine code: docs/log/xqa_decode.md, "Passages that differ only in names".
KNOWN: set[tuple[str, str]] = set()
KEYWORDS = (
    "alignas auto bool break case char class const constexpr continue decltype default do double else enum explicit "
    "false float for if inline int long namespace noexcept nullptr operator private protected public reinterpret_cast "
    "requires return short signed sizeof static static_assert static_cast struct switch template this true typename "
    "unsigned using void volatile while int32_t int64_t uint32_t uint64_t uint16_t uint8_t int8_t size_t"
)
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\d[\w.\']*|\S')


def code_lines(text: str) -> list[tuple[int, list[str]]]:
    """(number, tokens) of the lines that hold code, includes and macros left out."""
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    lines = [(number, re.sub(r"//.*", "", line).strip()) for number, line in enumerate(text.split("\n"), 1)]
    return [(number, TOKEN.findall(line)) for number, line in lines if line and not line.startswith("#")]


def shape(lines: list[tuple[int, list[str]]]) -> str:
    """The passage with names numbered by their first appearance."""
    names: dict[str, str] = {}
    kept = set(KEYWORDS.split())
    shaped = [
        " ".join(
            names.setdefault(word, f"${len(names)}") if re.match(r"[A-Za-z_]", word) and word not in kept else word
            for word in words
        )
        for _, words in lines
    ]
    return "\n".join(shaped)


def twins(files: dict[str, str]) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """(first place, another one) of passages that differ only in names."""
    places: dict[str, tuple[str, int]] = {}
    found = []
    for name, text in files.items():
        lines = code_lines(text)
        for start in range(len(lines) - LINES + 1):
            passage = shape(lines[start : start + LINES])
            here = (name, lines[start][0])
            first = places.setdefault(passage, here)
            if first[0] != name or lines[start][0] - first[1] >= LINES:  # not a list of lines that are alike
                found.append((first, here))
    return sorted(found)


def test_no_passages_differ_only_in_names():
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if (ROOT / name).exists()]
    assert len(names) > 200
    found = twins({name: (ROOT / name).read_text(encoding="utf-8") for name in names})
    assert {(one[0], other[0]) for one, other in found} <= KNOWN, [
        f"{one[0]}:{one[1]} ~ {other[0]}:{other[1]}" for one, other in found if (one[0], other[0]) not in KNOWN
    ]
    assert {(one[0], other[0]) for one, other in found} == KNOWN, "a known pair is gone: take it out of KNOWN"


def test_a_passage_with_other_names_is_found():
    body = "\n".join(f"  total{n} += values[{n}] * scale;" for n in range(LINES))
    other = body.replace("total", "sum").replace("values", "rows")
    assert twins({"a.h": body, "b.h": f"// comment\n{other}"}) == [(("a.h", 1), ("b.h", 2))]
    assert not twins({"a.h": body, "b.h": other.replace("[3] * ", "[3] + ")})
