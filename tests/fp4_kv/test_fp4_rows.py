"""Every row of the CUDA table of `fp4_decode`: that a call reaches it, and is right."""

import re
from pathlib import Path

import pytest
import torch
from attnops import ops
from checks import MAX_RELATIVE_ERROR, relative_error
from fp4_problems import E4M3, problem
from kernel_rows import reaches

TABLE = Path(__file__).parents[2] / "csrc/fp4_kv/impls.cpp"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of each row: page size, heads of q and of K, head dim, tokens.
ROWS = {
    **{f"{name}_hd{dim}_rows8": (16, 8, 2, dim, 2) for name in DTYPES for dim in (128, 64)},
    **{f"{name}_hd{dim}_rows16": (16, 8, 1, dim, 2) for name in DTYPES for dim in (128, 64)},
    **{f"sm90_{name}_latents": (128, 20, 1, 576, 2) for name in DTYPES},
    **{f"{name}_latents": (16, 20, 1, 576, 2) for name in DTYPES},
}


def test_the_rows_are_those_of_the_table():
    assert sorted(re.findall(r'^    \{"(\w+)",', TABLE.read_text(), re.MULTILINE)) == sorted(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_every_row(row):
    page_size, heads, kv_heads, dim, tokens = ROWS[row]
    dtype, mla = DTYPES[re.search("bf16|fp16", row)[0]], dim == 576
    q, k, v, table, lengths, _, _ = problem(page_size, heads, kv_heads, dim, tokens, dtype, mla=mla)
    of_v = (None, None) if mla else v
    expected = ops.fp4_decode(q.float(), k[0], of_v[0], k[1], of_v[1], table, lengths, softmax_scale=0.1)

    def on_gpu(pool):
        return (
            (None, None)
            if pool[0] is None
            else (pool[0].view(torch.uint8).cuda(), pool[1].view(torch.uint8).cuda().view(E4M3))
        )

    (k_pages, k_scales), (v_pages, v_scales) = on_gpu(k), on_gpu(of_v)
    report = torch.zeros(8, dtype=torch.int32, device="cuda")
    for checked in (None, report):
        with reaches("fp4_decode", row):
            out = ops.fp4_decode(
                q.cuda(), k_pages, v_pages, k_scales, v_scales, table.cuda(), lengths.cuda(), softmax_scale=0.1,
                report=checked,
            )  # fmt: skip
        assert relative_error(out.cpu(), expected.double()) <= MAX_RELATIVE_ERROR[dtype]
    assert not report.any()
