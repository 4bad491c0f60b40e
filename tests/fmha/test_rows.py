"""Every kernel of Hopper's prefill is a row of the table, under a name that says which one it is."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc/fmha"
TABLE = (CSRC / "impls.cpp").read_text()
FORMS = {
    "kBoxes": "",
    "kGather": "gather_",
    "kOneTile": "one_tile_",
    "kWholeRows": "whole_rows_",
    "kPlain": "plain_",
    "kPlainGather": "plain_gather_",
    "kFp8Keys": "fp8_keys_",
    "kPlainFp8Keys": "plain_fp8_keys_",
    "kFp8KeysGather": "fp8_keys_gather_",
    "kShort": "short_",
    "kShortGather": "short_gather_",
    "kShortOneTile": "short_one_tile_",
}
FILES = sorted((CSRC / "sm90/instantiations").glob("*.cu"))


def forms_of(text: str) -> set[str]:
    """What `kernels_of` in launch.cuh makes of an instantiation's shapes."""
    forms = {"kBoxes", "kGather"}
    if "__nv_fp8_e4m3" in text:
        return forms | ({"kPlain"} if "head_dim_qk = 128," in text else set())
    forms |= {"kFp8Keys", "kFp8KeysGather", "kPlainGather"}
    if ".warpgroups = 3" not in text:
        forms.add("kOneTile")
    if not re.search(r"head_dim_qk = (64|96),", text):
        forms.add("kWholeRows")
    if re.search(r"head_dim_qk = (64|96|128),", text):
        forms.add("kPlain")
    if "head_dim_qk = 128," in text:
        forms.add("kPlainFp8Keys")
    if ".ctas = 2" in text or ".lone = true" in text:
        forms |= {"kShort", "kShortGather", "kShortOneTile"}
    return forms


def test_the_forms_are_those_of_the_kernels():
    (names,) = re.findall(r"enum class Form \{(.*?)\}", (CSRC / "sm90/launch.h").read_text(), re.DOTALL)
    assert re.findall(r"\w+", names) == list(FORMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_kernel_of_an_instantiation_is_a_row(file):
    text = file.read_text()
    (kernels,) = re.findall(r"^const Kernels (k\w+) =", text, re.MULTILINE)
    dtype, dims = re.fullmatch(r"(\w+?)_hd(\w+)", file.stem).groups()
    assert kernels == f"k{dtype.capitalize()}Hd{dims}"
    rows = re.findall(r'\{"(\w+)", DType::(\w+), (\d+), (\d+), sm90::(\w+), Form::(\w+)', TABLE)
    rows = [row for row in rows if row[4] == kernels]
    expected = {f"sm90_{FORMS[form]}{file.stem}": form for form in forms_of(text)}
    assert {name: form for name, *_, form in rows} == expected and len(rows) == len(expected)
    qk, _, v = dims.partition("x")
    types = {"bf16": "kBFloat16", "fp16": "kFloat16", "e4m3": "kFloat8E4M3"}
    assert {row[1:4] for row in rows} == {(types[dtype], qk, v or qk)}


def test_no_row_is_of_kernels_that_there_are_not():
    known = {f"k{file.stem.partition('_')[0].capitalize()}Hd{file.stem.partition('_hd')[2]}" for file in FILES}
    assert set(re.findall(r"sm90::(k\w+), Form", TABLE)) == known
