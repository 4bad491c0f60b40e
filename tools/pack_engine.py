"""Packs the files that an engine needs on a machine without a network, whose torch stays in use.

    python tools/pack_engine.py sglang.tar.xz --requirements requirements/sglang.txt --no-deps \\
        requirements/sglang_no_deps.txt --present numpy pillow scipy --first transformers --stand-in sgl_kernel \\
        --without "sglang/*.so" "sglang/multimodal_gen/*"
    python tools/pack_engine.py nano.tar.xz --package xxhash --tree nanovllm=CHECKOUT/nanovllm

There: `tar xf sglang.tar.xz -C FOLDER && . FOLDER/env.sh`. That sets PYTHONPATH: trees, stand-ins and the packages of
`--no-deps` and `--first` before those of the machine, all others behind. Nothing is installed.

pip resolves for `--python` and for Linux on x86-64, whatever Python runs here, and takes wheels only. It reads a
requirement's conditions with the Python that runs here, so a package that newer Pythons alone need is for `--package`.
Torch, CUDA, `--present` and what these depend on are the machine's.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Of no use to a program that runs an engine. Sources stay, as some engines look for theirs: `--without` drops others.
WITHOUT = ["*.dist-info/sboms/*", "*/tests/*", "*/3rdparty/*"]
WITHOUT += ["*.pyi", "*.pyx", "*.a"]
NEWEST_GLIBC = 39
WINDOW = 64 << 20
STAND_IN = '''"""Stands in for a package that is imported and not used: any name and any module beneath it is there."""

import importlib.machinery
import sys
import types


class Anything(type):
    def __getattr__(cls, name):
        return made(name)

    def __call__(cls, *given, **named):
        return None  # what a kernel's options may be, too


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__, module.__path__ = made, []
        return module

    def exec_module(self, module):
        pass


def made(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {})


__getattr__ = made
sys.meta_path.append(Finder())
'''
ENVIRONMENT = """# `. env.sh` puts these packages beside the machine's own.
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
own=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH="$pack/first:${PYTHONPATH:+$PYTHONPATH:}$own:$pack/last"
"""


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n`{' '.join(command)}` failed")


def target_options(python: str) -> list[str]:
    """Wheels for that Python: pip matches each platform's name exactly, so all of them are named."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    named = [option for platform in platforms for option in ("--platform", platform)]
    return ["--only-binary=:all:", "--implementation=cp", "--python-version", python, *named]


def resolve(wanted: list[str], target: list[str], work: Path) -> dict[str, dict]:
    """Metadata by name: of what is wanted and of all that it depends on."""
    if not wanted:
        return {}
    report = work / "report.json"
    dry = ["--dry-run", "--ignore-installed", "--target", str(work / "none"), "--report", str(report)]
    pip("install", "-q", *dry, *target, *wanted)
    found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return {plain(entry["name"]): entry for entry in found}


def with_dependencies(names: list[str], found: dict[str, dict]) -> set[str]:
    """What was found under the names, which may be patterns, and all that it depends on."""
    todo, seen = [name for name in found if any(fnmatch.fnmatch(name, plain(known)) for known in names)], set()
    while todo:
        name = todo.pop()
        if name in found and name not in seen:
            seen.add(name)
            lines = found[name].get("requires_dist", [])
            todo += [plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines if "extra ==" not in line]
    return seen


def fill(place: Path, options: argparse.Namespace, work: Path) -> None:
    target = target_options(options.python)
    files = {kind: [f"-r{file}" for file in getattr(options, kind)] for kind in ("requirements", "no_deps")}
    found = resolve(files["requirements"] + options.package, target, work)
    present = with_dependencies(["torch", "nvidia-*", "cuda-*", *options.present], found)
    print("the machine's:", *sorted(present))
    pins = {name: f"{name}=={entry['version']}" for name, entry in found.items() if name not in present}
    first = [pins.pop(plain(name)) for name in options.first] + files["no_deps"]
    for folder, packages in (("first", first), ("last", list(pins.values()))):
        (place / folder).mkdir(parents=True)
        if packages:
            into = ["--target", str(place / folder), *target]
            pip("install", "-q", "--no-deps", "--no-compile", *into, *packages)
    for tree in options.tree:
        name, source = tree.split("=", 1)
        shutil.copytree(source, place / "first" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in options.stand_in:
        (place / "first" / name).mkdir()
        (place / "first" / name / "__init__.py").write_text(STAND_IN)
    (place / "env.sh").write_text(ENVIRONMENT)


def strip(folder: Path, patterns: list[str]) -> None:
    """Removes files by their path beneath `folder`, and what debuggers read of modules.

    Libraries that a wheel brings for its modules stay as they are: their names were patched, and strip may break them.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            path.unlink()
        elif path.suffix == ".so" and ".libs/" not in name and shutil.which("strip"):
            subprocess.run(["strip", "--strip-debug", path], check=True)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def compress(place: Path, file: Path) -> None:
    """A long window, and like files side by side: an engine's models repeat each other."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 4, "dict_size": WINDOW}]
    paths = sorted((path for path in place.rglob("*") if path.is_file()), key=lambda path: (path.suffix, path.name))
    with lzma.open(file, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in paths:
            archive.add(path, str(path.relative_to(place)), filter=anonymous)


def report(place: Path) -> None:
    """What each package takes, the largest first."""
    sizes = {}
    for folder in (place / "first", place / "last"):
        for entry in folder.iterdir():
            files = [path for path in (entry, *entry.rglob("*")) if path.is_file()]
            sizes[f"{folder.name}/{entry.name}"] = sum(path.stat().st_size for path in files)
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:20]:
        print(f"{sizes[name] / 1e6:8.2f} MB  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="the file to write, .tar.xz")
    parser.add_argument("--python", default="3.12", help="the machine's")
    parser.add_argument("--requirements", nargs="*", default=[], help="files; with what they depend on")
    parser.add_argument("--package", nargs="*", default=[], help="further requirements, with what they depend on")
    parser.add_argument("--no-deps", nargs="*", default=[], help="files; alone")
    parser.add_argument("--present", nargs="*", default=[], help="packages of the machine, with what they depend on")
    parser.add_argument("--first", nargs="*", default=[], help="packages that come before the machine's")
    parser.add_argument("--tree", nargs="*", default=[], metavar="NAME=FOLDER", help="a folder of Python files")
    parser.add_argument("--stand-in", nargs="*", default=[], help="names that are imported and not used")
    parser.add_argument("--without", nargs="*", default=[], help="patterns of paths beneath a folder of packages")
    parser.add_argument("--keep", type=Path, help="write the files here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        place = options.keep or Path(work, "pack")
        fill(place, options, Path(work))
        for folder in ("first", "last"):
            strip(place / folder, WITHOUT + options.without)
        report(place)
        compress(place, options.pack)
    print(f"{options.pack}: {options.pack.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
