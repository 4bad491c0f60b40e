"""Checks that every link and picture of the built book leads to a file and a place in it: ``make docs`` runs it.

Sphinx checks what it resolves itself. This looks at the pages as a browser gets them. It uses no network.
"""

import re
import sys
import urllib.parse
from pathlib import Path

ELSEWHERE = re.compile(r"[a-z]+:|//")


def broken_links(folder: Path) -> list[str]:
    """Page and target of each link within `folder` that leads nowhere."""
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    places = {path: set(re.findall(r'id="([^"]+)"', text)) for path, text in texts.items()}
    broken = []
    for page, text in texts.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            if ELSEWHERE.match(target):
                continue
            file, _, place = target.partition("#")
            name = urllib.parse.unquote(file.partition("?")[0])
            found = (page.parent / name).resolve() if name else page
            missing = place and found in places and urllib.parse.unquote(place) not in places[found]
            if not found.exists() or missing:
                broken.append(f"{page.relative_to(folder.resolve())}: {target}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    sys.stdout.write("".join(f"{link}\n" for link in found))
    sys.exit(f"{len(found)} links lead nowhere" if found else 0)
