"""Finds sentences of more than 25 words in the README, the book, docstrings and error messages.

``python tools/plain_english.py [path ...]`` prints them with their places, and exits with 1 if there is any that
EXCEPTIONS does not name. Code in backticks counts as one word. An item of a list is a text of its own, and so is what
semicolons divide in a cell of a table.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
TEXTS = ("*.md", "python/*.py", "csrc/*.cpp", "csrc/*.h", "csrc/*.cu", "csrc/*.cuh")
# Logs of experiments are notes of their day; the changelog of a release is a list of names.
LEFT_OUT = ("docs/log/", "benchmarks/results/", "examples/weights/", "CHANGELOG.md")
# Sentences that stay long, each by its first words: at most 20.
EXCEPTIONS: frozenset[str] = frozenset()

CODE = re.compile(r"``[^`]+``|`[^`]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A sentence ends at a full stop before a new word: not inside 0.98x, e.g. or a file's name.
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!cf)(?<!vs)[.!?][)\"']*\s+(?=[A-Z`\"'(\[*_\d-])")
ENTRY = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")  # an item of a list
FIELD = re.compile(r"^\s*[\w`*][\w`*, ./]*:\s+(?=\S)")  # "name, other: what it is"
CPP_COMMENT = re.compile(r"//.*")
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
STATEMENT = re.compile(r"(?:fail|STD_TORCH_CHECK|reject|return|throw)\b[^;]*?;", re.DOTALL)
RULE = re.compile(r"^\s*(?:\|[-:| ]+\||[-=]{3,}|#+ .*|:::.*|\(.+\)=)\s*$")


@dataclass(frozen=True)
class Sentence:
    """A sentence and its place."""

    path: str
    line: int
    text: str

    @property
    def words(self) -> int:
        plain = LINK.sub(r"\1", CODE.sub(" code ", self.text))
        return sum(any(letter.isalnum() for letter in word) for word in plain.split())


def sentences_of(path: Path) -> Iterator[Sentence]:
    """Every sentence of a file that people read."""
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = markdown_blocks(text)
    elif path.suffix == ".py":
        blocks = python_blocks(text)
    else:
        blocks = cpp_messages(text)
    for line, block in blocks:
        for sentence in END.split(" ".join(block.split())):
            if sentence.strip():
                yield Sentence(name, line, sentence.strip())


def markdown_blocks(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs, items of lists and cells of tables."""
    start, kept, fence = first_line, [], ""
    for number, line in enumerate(text.splitlines(), first_line):
        mark = re.match(r"\s*(```+|~~~+|:::+)", line)
        if fence or mark:
            if kept:
                yield start, " ".join(kept)
            kept = []
            if mark:
                fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
            if not fence or not fence.startswith(":"):
                continue
            continue
        cells = line.strip().startswith("|")
        if not line.strip() or RULE.match(line) or cells or ENTRY.match(line):
            if kept:
                yield start, " ".join(kept)
            kept = []
        if cells and not RULE.match(line):
            yield from ((number, part) for part in re.split(r"(?<!\\)\||;", line.strip().strip("|")))
        elif line.strip() and not RULE.match(line) and not cells:
            if not kept:
                start = number
            kept.append(ENTRY.sub("", line))
    if kept:
        yield start, " ".join(kept)


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, entry by entry, and every other text: messages of errors, help of commands."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=True)
            if docstring:
                first = node.body[0].lineno
                docstrings.add(first)
                yield from docstring_blocks(docstring, first)
        elif isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            message = literal(node)
            if " " in message and ") -> (" not in message and node.lineno not in docstrings:  # a schema is code
                yield node.lineno, message


def docstring_blocks(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    """As Markdown, and an entry of Args, Returns or Raises is a text, without the name it is about."""
    lines, section = [], False
    for line in text.splitlines():
        if re.fullmatch(r"\s*(Args|Returns|Raises|Attributes|Yields|Environment|Note|Usage|Source):", line):
            section, line = True, ""
        entry = re.match(r"^ {4}(?=\S)", line) if section else None
        if line and not line.startswith(" "):
            section = False
        if entry:
            lines.append((True, FIELD.sub("", line.strip(), count=1)))
        else:
            lines.append((False, line))
    joined, number = [], first_line
    for begins, line in lines:
        if begins:
            if joined:
                yield from markdown_blocks("\n".join(joined), number - len(joined))
            joined = []
        joined.append(line.strip() if line.startswith("        ") else line)
        number += 1
    yield from markdown_blocks("\n".join(joined), number - len(joined))


def literal(node: ast.expr) -> str:
    """The text of a string; what is filled in counts as a word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return ""


def cpp_messages(text: str) -> Iterator[tuple[int, str]]:
    """String literals of a statement that fails or refuses, as one message; and every other literal of some words."""
    text = CPP_COMMENT.sub("", text)  # ends before its line does: places stay
    told = 0
    for found in STATEMENT.finditer(text):
        yield from cpp_literals(text, told, found.start())
        told = found.end()
        parts = LITERAL.findall(found[0])
        if parts and " " in "".join(parts):
            yield text.count("\n", 0, found.start()) + 1, " X ".join(parts).replace("\\n", " ")
    yield from cpp_literals(text, told, len(text))


def cpp_literals(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Literals between two places, neighbours joined. What has an arrow or operands is code: schemas and assembly."""
    for found in re.finditer(rf"(?:{LITERAL.pattern}\s*)+", text[start:end]):
        message = "".join(LITERAL.findall(found[0])).replace("\\n", " ")
        if " " in message and "->" not in message and "%" not in message:
            yield text.count("\n", 0, start + found.start()) + 1, message


def files(paths: list[str]) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *(paths or TEXTS)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [ROOT / name for name in listed if not name.startswith(LEFT_OUT) and (ROOT / name).exists()]


def too_long(paths: list[str]) -> list[Sentence]:
    """The sentences of more than MOST_WORDS words, those of EXCEPTIONS left out."""
    return [
        sentence
        for path in files(paths)
        for sentence in sentences_of(path)
        if sentence.words > MOST_WORDS and not any(sentence.text.startswith(known) for known in EXCEPTIONS)
    ]


if __name__ == "__main__":
    found = too_long(sys.argv[1:])
    for one in found:
        sys.stdout.write(f"{one.path}:{one.line}: {one.words} words: {one.text}\n")
    sys.stdout.write(f"{len(found)} sentences of more than {MOST_WORDS} words\n")
    sys.exit(bool(found))
