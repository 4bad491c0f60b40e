"""Two partial results into one."""

# Triton's language has types of its own.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def merge_state_kernel(
    out, lse, out_a, lse_a, out_b, lse_b, out_token, out_head, a_token, a_head, b_token, b_head, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, heads). A side whose lse is -inf is selected away: it may hold anything."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * num_heads + head
    d = tl.arange(0, BLOCK_D)
    of_a = tl.load(lse_a + row)
    of_b = tl.load(lse_b + row)
    a = tl.load(out_a + token * a_token + head * a_head + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(out_b + token * b_token + head * b_head + d, mask=d < D, other=0.0).to(tl.float32)
    no_a = of_a == float("-inf")
    no_b = of_b == float("-inf")
    highest = tl.maximum(of_a, of_b)
    safe = tl.where(no_a & no_b, 0.0, highest)
    weight_a = tl.where(no_a, 0.0, tl.exp(of_a - safe))
    weight_b = tl.where(no_b, 0.0, tl.exp(of_b - safe))
    total = weight_a + weight_b
    whole = tl.where(no_a & no_b, 1.0, total)
    merged = tl.where(no_a, 0.0, a * (weight_a / whole)) + tl.where(no_b, 0.0, b * (weight_b / whole))
    tl.store(lse + row, tl.where(no_a & no_b, float("-inf"), safe + tl.log(whole)))
    tl.store(out + token * out_token + head * out_head + d, merged.to(out.dtype.element_ty), mask=d < D)
