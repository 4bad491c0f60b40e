"""Includes and imports go downwards only: the table of docs/architecture.md, "Layers", read off the sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC, PACKAGE = ROOT / "csrc", ROOT / "python" / "attnops"
SHARED = {"core", "scheduler", "device", "cpu", "torch_bindings", "host_bindings"}
# Families that join others: their checks, params, plans and launches, no kernels of their own.
JOINED = {"layer_call", "sparse_mla", "conv_step"}
FAMILIES = {path.name for path in CSRC.iterdir() if path.is_dir()} - SHARED

# What a Python layer may import of the package, besides its own folder. Longer prefixes win.
PYTHON_LAYERS = {
    "_load": set(),
    "modes": set(),
    "types": {"modes"},
    "environment": set(),
    "report": {"environment"},
    "reference": {"types"},
    "metadata": {"types", "_load"},
    "ops": {"_load", "_layer_call", "types", "metadata", "environment"},
    "pools": {"types", "ops", "metadata", "_load"},
    "graph_buffers": {"types", "report", "ops", "metadata", "_load", "pools"},
    "plan_buffers": {"types", "ops", "metadata", "graph_buffers"},
    "layers": {"types", "pools"},
    "compat": {"environment", "ops", "metadata"},
    "distributed": {"ops"},
    "state_snapshots": {"ops"},
    "speculative": {"ops", "types"},
    "triton_kernels": set(),
    "backends": {
        "environment",
        "triton_kernels",
        "types",
        "report",
        "reference",
        "metadata",
        "ops",
        "pools",
        "graph_buffers",
        "plan_buffers",
        "layers",
        "_load",
    },
    "graphs": {"types", "pools", "layers", "backends"},
    "plugins": {
        "environment",
        "types",
        "ops",
        "metadata",
        "pools",
        "layers",
        "plan_buffers",
        "graph_buffers",
        "backends",
        "compat",
        "distributed",
    },
}
ENGINES = {"vllm", "sglang", "transformers"}


def includes(path):
    return re.findall(r'^#include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def sources(*suffixes):
    return [path for path in CSRC.rglob("*") if path.suffix in suffixes]


def top(path):
    return path.relative_to(CSRC).parts[0]


def is_binding(path):
    """L3 and L4: the only files that may see torch."""
    return top(path) in {"torch_bindings", *JOINED} or path.name in {"checks.h", "op.h", "op_cpu.cpp", "op_cuda.cpp"}


def is_joint(name):
    """What a joining family may include of the others, and of itself."""
    family, rest = name.split("/", 1)
    plain = {"params.h", "plan.h", "checks.h", "impls.h", "cuda/plan.h", "cuda/lists.h"}
    return family in JOINED or rest in plain or rest.endswith("/launch.h")


def test_only_bindings_include_torch():
    for path in sources(".h", ".cuh", ".cu", ".cpp"):
        seen = [name for name in includes(path) if name.startswith(("torch/", "ATen/", "c10/", "torch_bindings/"))]
        assert is_binding(path) or not seen, f"{path.relative_to(ROOT)} includes {seen}"
        assert not [n for n in seen if n.startswith(("ATen/", "c10/")) or n == "torch/extension.h"], path


def test_no_family_includes_another():
    for path in sources(".h", ".cuh", ".cu", ".cpp"):
        if top(path) not in FAMILIES:
            foreign = [name for name in includes(path) if name.split("/")[0] in FAMILIES]
        elif top(path) in JOINED:
            foreign = [name for name in includes(path) if name.split("/")[0] in FAMILIES and not is_joint(name)]
        else:
            foreign = [name for name in includes(path) if name.split("/")[0] in FAMILIES - {top(path)}]
        assert not foreign, f"{path.relative_to(ROOT)} includes {foreign}"


def test_core_and_scheduler_are_plain_cpp():
    for path in [*(CSRC / "core").rglob("*.h"), *(CSRC / "scheduler").rglob("*.h")]:
        foreign = [
            n for n in includes(path) if n.split("/")[0] not in {"core", "scheduler"} and ("/" in n or ".h" in n)
        ]
        assert not foreign, f"{path.relative_to(ROOT)} includes {foreign}"


def test_bindings_do_not_include_kernels():
    for path in sources(".h", ".cpp"):
        if is_binding(path):
            kernels = [name for name in includes(path) if name.endswith(".cuh")]
            assert not kernels, f"{path.relative_to(ROOT)} includes {kernels}"


def test_device_code_has_no_host_only_layers():
    for path in sources(".cu", ".cuh"):
        foreign = [name for name in includes(path) if name.split("/")[0] == "cpu"]
        assert not foreign, f"{path.relative_to(ROOT)} includes {foreign}"


def test_python_imports_go_downwards():
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if layer not in PYTHON_LAYERS:
            continue
        # What only a type checker imports counts, too: a circle of types is a circle.
        found = re.findall(
            r"^\s*(?:from attnops\.?([\w.]*) import (\w+)|import attnops\.(\w+))", path.read_text(), re.M
        )
        names = {(module.split(".")[0] if module else name) or direct for module, name, direct in found}
        foreign = names - PYTHON_LAYERS[layer] - {layer}
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_an_engine_is_imported_by_its_own_module_alone():
    for path in PACKAGE.rglob("*.py"):
        found = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M)
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        own = set(parts[1:2]) if parts[0] == "plugins" else set()
        foreign = (set(found) & ENGINES) - own
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_importing_attnops_imports_no_engine_and_no_plugin():
    program = (
        "import sys, attnops, attnops.backends, attnops.compat, attnops.graphs, attnops.layers, attnops.info\n"
        f"loaded = [name for name in sys.modules if name.split('.')[0] in {sorted(ENGINES)}]\n"
        "loaded += [name for name in sys.modules if name.startswith('attnops.plugins.')]\n"
        "print(sorted(set(loaded) - {'attnops.plugins.engines'}))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_submodules_are_reachable_after_importing_the_package_alone():
    program = "import attnops\nfor name in sorted(attnops._SUBMODULES):\n    assert getattr(attnops, name), name\n"
    subprocess.run([sys.executable, "-c", program + "attnops.graphs.GraphRunner"], check=True)


def test_a_layers_call_is_written_out_once():
    """Backends hand its arguments on, or take the few that they read themselves."""
    whole = {"q", "k", "v", "layer", "batch", "save_kv_cache", "q_rope", "k_rope", "out"}
    found = []
    for folder in ("backends", "graphs", "layers"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
                    found += [f"{path.name} {node.name}"] if names >= whole else []
    assert found == ["base.py forward"]
