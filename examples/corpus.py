"""The text that the example models are trained on, built from Debian packages.

Eight public-domain works: the six novels of Jane Austen, Herman Melville's "Moby-Dick" and the King James Bible. Get
the packages (Debian 12 has the versions named here) and build the text with

    apt-get download r-cran-janeaustenr r-cran-tokenizers bible-kjv bible-kjv-text
    python examples/corpus.py --packages . --out corpus.txt

The result is plain ASCII: one line per paragraph, an empty line between paragraphs, a zero byte after each work.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import struct
import subprocess
import tarfile
import tempfile
import unicodedata
import zlib
from pathlib import Path

# sha256 of the corpus built from r-cran-janeaustenr 1.0.0-1, r-cran-tokenizers 0.3.0-1, bible-kjv 4.38 and
# bible-kjv-text 4.38; another version of a package may give another text.
CORPUS_SHA256 = "8d2a05305a2e01744d5533305b02aa7f77445f336ce30d2212a01d97add9fcf2"

WORK_END = "\0"
# The part of each work that training never sees, as fractions of the work's length.
HELD_OUT = (0.600, 0.625)


def open_deb(packages: Path, name: str) -> tarfile.TarFile:
    """The data archive of the one `name`_*.deb in `packages`."""
    found = sorted(packages.glob(f"{name}_*.deb"))
    if len(found) != 1:
        raise FileNotFoundError(f"need one {name}_*.deb in {packages}, found {len(found)}: apt-get download {name}")
    deb = found[0].read_bytes()
    # A .deb is an `ar` archive: an 8-byte magic, then members with 60-byte headers, padded to even lengths.
    pos = 8
    while pos < len(deb):
        header = deb[pos : pos + 60]
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return tarfile.open(fileobj=io.BytesIO(deb[pos + 60 : pos + 60 + size]))
        pos += 60 + size + size % 2
    raise ValueError(f"{found[0]} has no data archive")


def read_r_strings(lazy_load_db: bytes) -> list[list[str]]:
    """The character vectors of an R lazy-load database (`data/Rdata.rdb`), in the order they are stored.

    Each object is a 4-byte big-endian length and one zlib stream. Inside is R's XDR serialization, format 3: here
    a 23-byte header, the type word, the count, then per string a type word, a length and the bytes.
    """
    vectors = []
    pos = 0
    while pos < len(lazy_load_db):
        stream = zlib.decompressobj()
        data = stream.decompress(lazy_load_db[pos + 4 :])
        pos = len(lazy_load_db) - len(stream.unused_data)
        type_word, count = struct.unpack_from(">II", data, 23)
        if type_word & 0xFF != 16:
            raise ValueError(f"expected an R character vector (type 16), got type {type_word & 0xFF}")
        strings, at = [], 31
        for _ in range(count):
            (length,) = struct.unpack_from(">i", data, at + 4)
            strings.append(data[at + 8 : at + 8 + length].decode("utf-8"))
            at += 8 + length
        vectors.append(strings)
    return vectors


def read_r_data(packages: Path, r_package: str) -> list[list[str]]:
    with open_deb(packages, f"r-cran-{r_package}") as deb:
        file = deb.extractfile(f"./usr/lib/R/site-library/{r_package}/data/Rdata.rdb")
        if file is None:
            raise ValueError(f"r-cran-{r_package} has no data file")
        return read_r_strings(file.read())


def austen(packages: Path) -> list[str]:
    novels = ["\n".join(lines) for lines in read_r_data(packages, "janeaustenr")]
    # The one note that a modern editor added, at the end of "Northanger Abbey".
    return [novel.split("A NOTE ON THE TEXT")[0] for novel in novels]


def moby_dick(packages: Path) -> list[str]:
    [[text]] = read_r_data(packages, "tokenizers")
    # Only the work itself: the transcriber's header and licence go. They name their own project, the work does not.
    text = re.split(r"\*\*\* ?START OF[^\n]*\*\*\*", text.replace("\r\n", "\n"))[1]
    text = re.split(r"\*\*\* ?END OF", text)[0]
    text = re.split(r"\nEnd of[^\n]*Gutenberg", text)[0]
    return ["MOBY DICK; OR THE WHALE\n\nBy Herman Melville\n\n" + text[text.index("ETYMOLOGY.") :]]


def king_james(packages: Path) -> list[str]:
    """One paragraph per chapter. The text's own compression is read by the package's own reader."""
    with tempfile.TemporaryDirectory() as tmp:
        for name in ("bible-kjv", "bible-kjv-text"):
            with open_deb(packages, name) as deb:
                deb.extractall(tmp, filter="data")
        command = [f"{tmp}/usr/bin/bible", "-f", "-p", f"{tmp}/usr/lib", "gen1:1-rev22:21"]
        verses = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    chapters: dict[str, list[str]] = {}
    for verse in verses:
        reference, text = verse.split(" ", 1)
        chapters.setdefault(reference.split(":")[0], []).append(text)
    return ["\n\n".join(" ".join(chapter) for chapter in chapters.values())]


def clean(text: str) -> str:
    """Paragraphs on one line each, ASCII only, no italics marks."""
    for fancy, plain in (("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2014", "--")):
        text = text.replace(fancy, plain)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().replace("_", "")
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n\n"


def build(packages: Path) -> str:
    works = austen(packages) + moby_dick(packages) + king_james(packages)
    return "".join(clean(work) + WORK_END for work in works)


def split(corpus: bytes) -> tuple[bytes, bytes]:
    """(train, held_out): from each work one contiguous block, HELD_OUT, is held out."""
    train, held_out = [], []
    for work in corpus.split(WORK_END.encode())[:-1]:
        begin, end = (int(fraction * len(work)) for fraction in HELD_OUT)
        train += [work[:begin], WORK_END.encode(), work[end:], WORK_END.encode()]
        held_out += [work[begin:end]]
    return b"".join(train), b"".join(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with the four .deb files")
    parser.add_argument("--out", type=Path, default=Path("corpus.txt"))
    args = parser.parse_args()

    corpus = build(args.packages).encode("ascii")
    args.out.write_bytes(corpus)
    digest = hashlib.sha256(corpus).hexdigest()
    print(f"{args.out}: {len(corpus)} bytes, sha256 {digest}")
    if digest != CORPUS_SHA256:
        print(f"note: not the text of the shipped weights (sha256 {CORPUS_SHA256})")


if __name__ == "__main__":
    main()
