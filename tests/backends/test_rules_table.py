"""The table of choices, row by row, as words: what each machine gets with each set of packages, and why not others.

`test_rules.py` says the rule again for every machine and package. Here stands what a user reads in docs/choosing.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from attnops.backends import Machine, get_backend_class, select
from attnops.backends.machine import PACKAGES
from attnops.backends.rules import order
from attnops.environment import VARIABLES
from attnops.types import AttentionSpec, ForwardMode

GQA = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=64)
TRITON, FLASHINFER = "triton", "flashinfer"
WHEEL = frozenset({80, 90})  # what this package's own wheel is built for


def mla(page_size: int) -> AttentionSpec:
    return AttentionSpec.mla(16, page_size=page_size)


def cuda(arch: int, built: frozenset[int] = WHEEL) -> Machine:
    return Machine(device="cuda", arch=arch, has_cuda_kernels=True, built_archs=built)


# Machine, model, packages -> (prefill, decode).
OWN = ("fa3", "fa3")  # on Hopper; of trees as the next
PORTABLE = ("fa3", "trtllm_mha")
SLOW = ("torch_native", "torch_native")
IN_TRITON = ("triton", "triton")
IN_FLASHINFER = ("flashinfer", "flashinfer")
TABLE = [
    *((cuda(90), GQA, packages, OWN) for packages in ((), (TRITON,), (TRITON, FLASHINFER), tuple(PACKAGES))),
    *(
        (cuda(90), mla(size), packages, ("fa3", decode))
        for size, decode in ((64, "flashmla"), (128, "cutlass_mla"), (32, "trtllm_mla"), (16, "fa3"), (1, "fa3"))
        for packages in ((), tuple(PACKAGES))
    ),
    *((cuda(arch), GQA, packages, PORTABLE) for arch in (80, 86, 87, 89) for packages in ((), tuple(PACKAGES))),
    *((cuda(arch), mla(64), (), SLOW) for arch in (80, 86, 87, 89)),
    *((cuda(arch), mla(64), (TRITON,), IN_TRITON) for arch in (80, 86, 87, 89)),
    *((cuda(arch), mla(64), tuple(PACKAGES), IN_TRITON) for arch in (80, 86, 87, 89)),
    # A build without their code: nothing of ours is there but Triton's.
    *((cuda(arch), spec, (), SLOW) for arch in (100, 103, 120, 121) for spec in (GQA, mla(64))),
    *((cuda(arch), spec, (TRITON,), IN_TRITON) for arch in (100, 103, 120, 121) for spec in (GQA, mla(64))),
    # A build with it has the portable rows, which are of MHA.
    *((cuda(arch, frozenset({arch})), GQA, (TRITON,), PORTABLE) for arch in (100, 103, 120, 121)),
    *((cuda(arch, frozenset({arch})), GQA, tuple(PACKAGES), PORTABLE) for arch in (120, 121)),
    *((cuda(arch, frozenset({arch})), mla(64), tuple(PACKAGES), IN_TRITON) for arch in (120, 121)),
    # And FlashInfer before them on sm_100, but for trees.
    *(
        (cuda(arch, frozenset({arch})), spec, tuple(PACKAGES), IN_FLASHINFER)
        for arch in (100, 103)
        for spec in (GQA, mla(64))
    ),
    *((Machine(device=device), spec, (), SLOW) for device in ("hip", "xpu", "npu") for spec in (GQA, mla(64))),
    *((Machine(device=d), spec, tuple(PACKAGES), IN_TRITON) for d in ("hip", "xpu") for spec in (GQA, mla(64))),
    *((Machine(device="npu"), spec, tuple(PACKAGES), SLOW) for spec in (GQA, mla(64))),
    *(
        (Machine(device="cpu"), spec, packages, ("intel_amx", "intel_amx"))
        for spec in (GQA, mla(64), mla(1))
        for packages in ((), tuple(PACKAGES))
    ),
]


def chosen(machine: Machine, spec: AttentionSpec, packages, **options):
    machine = dataclasses.replace(machine, packages=frozenset(packages))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that torch_native is slow
        return select(spec, machine, **options)


def row_id(row) -> str:
    machine, spec, packages, _ = row
    where = f"sm_{machine.arch}" if machine.arch else machine.device
    model = f"mla{spec.page_size}" if spec.is_mla else "mha"
    return f"{where}-{model}-{'+'.join(packages) if len(packages) < 3 else 'all'}"


@pytest.mark.parametrize("topk", [None, 1, 4])
@pytest.mark.parametrize("row", TABLE, ids=row_id)
def test_a_row_of_the_table(row, topk):
    machine, spec, packages, (prefill, decode) = row
    got = chosen(machine, spec, packages, speculative_eagle_topk=topk, cpu_seq_lens=True)
    if machine.arch == 90 and not spec.is_mla and topk == 4:
        prefill, decode = PORTABLE
    if prefill == "flashinfer" and topk == 4:  # prefill's side verifies
        prefill = "triton" if spec.is_mla else "fa3"
    assert (got.prefill, got.decode) == (prefill, decode)
    if machine.device == "cuda" and not spec.is_mla and topk == 4:  # by whom a tree is verified: never by fa3 on sm_90
        verifies = getattr(got, got.speculative_attention_mode)
        assert verifies == ("trtllm_mha" if machine.arch == 90 else prefill)
    assert all(reasons and all(reason.strip() for reason in reasons) for reasons in got.rejected.values())


def test_who_verifies_a_tree_on_hopper_unless_it_is_said():
    got = chosen(cuda(90), GQA, (), speculative_eagle_topk=4)
    assert (got.prefill, got.decode, got.speculative_attention_mode) == ("fa3", "trtllm_mha", "decode")
    for topk in (None, 1):
        assert chosen(cuda(90), GQA, (), speculative_eagle_topk=topk).speculative_attention_mode == "prefill"
    for said in (
        {"speculative_attention_mode": "prefill"},
        {"prefill_attention_backend": "fa3"},
        {"decode_attention_backend": "trtllm_mha"},
    ):
        got = chosen(cuda(90), GQA, (), speculative_eagle_topk=4, **said)
        assert (got.prefill, got.decode, got.speculative_attention_mode) == ("fa3", "trtllm_mha", "prefill")


@pytest.mark.parametrize("spec", [GQA, mla(64)], ids=["mha", "mla"])
def test_flashinfers_place(spec):
    """The rows with flashinfer: with the package, and with lengths on the host or without."""
    for arch, packages, lengths in itertools.product((80, 90, 100, 120), ((FLASHINFER,), (FLASHINFER, TRITON)), (0, 1)):
        got = chosen(cuda(arch), spec, packages, cpu_seq_lens=bool(lengths)).decode
        if arch == 90 or (arch == 80 and not spec.is_mla):
            expected = "flashmla" if spec.is_mla else {80: "trtllm_mha", 90: "fa3"}[arch]
        elif arch in (80, 120) and spec.is_mla and TRITON in packages:
            expected = "triton"  # stands before it there
        elif lengths:
            expected = "flashinfer"
        else:
            expected = "triton" if TRITON in packages else "torch_native"
        assert got == expected, (arch, packages, lengths)
        for kind in ("local_chunk", "hybrid_linear"):
            got = chosen(cuda(arch), GQA, packages, cpu_seq_lens=True, model_kind=kind)
            assert "flashinfer" not in (got.decode, got.prefill)


def test_reasons_name_what_to_install_and_what_is_untested():
    missing = chosen(cuda(100), GQA, ()).rejected
    assert missing["flashinfer"][:1] == ["needs the package flashinfer-python, which is not installed"]
    assert missing["triton"] == ["needs the package triton, which is not installed"]
    assert missing["fa3"][0].startswith("needs kernels for sm_100 (ATTNOPS_ARCHS), this build has those of sm_80 and")
    rejected = chosen(Machine(device="hip"), GQA, tuple(PACKAGES)).rejected
    assert rejected["aiter"][0].startswith("untested_on_hardware: nobody has run it")


CHOOSING = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text()


@pytest.mark.parametrize(
    ("row", "column", "machine"),
    [
        ("sm_90", 0, cuda(90)),
        ("sm_90", 1, cuda(90)),
        *(("sm_80 to sm_89, sm_120", 1, cuda(arch)) for arch in (80, 86, 87, 89, 120, 121)),
        *(("sm_100, sm_103", 1, cuda(arch)) for arch in (100, 103)),
        ("CPU", 0, Machine(device="cpu")),
    ],
)
def test_the_page_tells_the_order(row, column, machine):
    cells = next(line for line in CHOOSING.splitlines() if line.startswith(f"| {row} |")).split("|")[2:]
    told = re.findall(r"`(\w+)`", cells[column].split(";")[0])
    # Backends of sparse models and of DeepSeek-V4 serve no others.
    assert told == [name for name in order(machine, bool(column)) if name not in ("nsa", "dsv4")]


def test_the_page_tells_of_every_environment_variable():
    assert [one.name for one in VARIABLES if f"`{one.name}`" not in CHOOSING] == []


BLOCKED = """
import importlib.abc, sys
tops = {name.split(".")[0] for name in %r}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in tops:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocker())
import attnops
from attnops.backends import Machine, get_backend_class, registered_names, select
from attnops.types import AttentionSpec
names = [get_backend_class(name).name for name in registered_names()]
machine = Machine(device="cuda", arch=90, has_cuda_kernels=True)
assert select(AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64), machine).decode == "fa3"
try:
    select(AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64), machine, attention_backend="triton")
except NotImplementedError as error:
    assert "needs the package triton" in str(error) and "These would: fa3" in str(error)
assert not tops & {name.split(".")[0] for name in sys.modules} - {"flash_attn"}
print(len(names))
"""


@pytest.mark.parametrize("package", [*PACKAGES, "all"])
def test_no_packages_absence_breaks_an_import(package):
    blocked = list(PACKAGES) if package == "all" else [package]
    done = subprocess.run([sys.executable, "-c", BLOCKED % blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]


def test_asking_for_backend_classes_imports_no_package_and_starts_no_device():
    program = (
        "import sys, torch\nfrom attnops.backends import get_backend_class, registered_names\n"
        "[get_backend_class(name) for name in registered_names()]\n"
        "assert not {'triton', 'flashinfer', 'aiter'} & (set(sys.modules) - before), set(sys.modules) - before\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    program = "import sys, torch\nbefore = set(sys.modules)\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]


def test_modes_of_a_decoder_are_completed_by_the_first_that_prefills():
    got = chosen(cuda(90), mla(64), (), attention_backend="flashmla", speculative_eagle_topk=4)
    assert (got.prefill, got.decode) == ("fa3", "flashmla")
    assert ForwardMode.EXTEND not in get_backend_class("flashmla").capability.modes
