"""Random batches whose blocks of heads go in pairs, over NaN, against float64. On a GPU, not collected by pytest.

python tests/fmha/fuzz_pairs.py [seconds] [first seed]
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import torch
from fmha_calls import assert_right
from problems import paged_problem, ragged_problem, random_tree_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn


def check(seed: int) -> str:
    """Raises where the op is wrong. Returns what it was."""
    r = random.Random(seed)
    lengths = [r.choice([0, 1, 3, 17, 64, 100, 129, 300, 513]) for _ in range(r.choice([1, 2, 3, 6]))]
    keys = [n + r.choice([0, 5, 700, 2000]) for n in lengths]
    kv_heads, group = r.choice([1, 2, 3]), r.choice([1, 2, 4, 8, 16, 6, 7, 5, 11, 35])
    head_dim, head_dim_v = r.choice([(128, 128), (128, 128), (104, 120), (64, 64), (192, 128), (256, 256)])
    options = {
        "causal": r.random() < 0.7,
        "window_left": r.choice([-1, -1, 5, 128]),
        "logit_cap": r.choice([0.0, 0.0, 30.0]),
        "tile_q": r.choice([1, 16, 32, 64, 64, 96, 128, 128, 300]),
    }
    tree = options["causal"] and max(lengths) > 0 and r.random() < 0.3
    common = dict(num_q_heads=kv_heads * group, num_kv_heads=kv_heads, seed=seed, kv_dtype=r.choice([None, None, FP8]))
    if r.random() < 0.5:
        page_size = r.choice([1, 8, 16, 24, 64, 128])
        problem = paged_problem(keys, lengths, head_dim=head_dim, page_size=page_size, **common)
    else:
        padding = 0 if tree else 3
        problem = ragged_problem(lengths, keys, head_dim=head_dim, head_dim_v=head_dim_v, padding=padding, **common)
    text = f"seed {seed}: {lengths} on {keys}, {kv_heads} x {group} heads, {head_dim}, {options}"
    if tree:
        options["tree_mask"] = random_tree_mask(lengths, seed=seed).to(DEVICE)
    try:
        assert_right(problem.to(DEVICE), **options)
    except Exception as problem_found:
        raise AssertionError(text) from problem_found
    return text


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30
    seed = first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    wrong, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds and wrong < 6:
        try:
            check(seed)
        except AssertionError as problem:
            wrong += 1
            print(f"WRONG {problem}: {str(problem.__cause__)[:200]}", flush=True)
        seed += 1
    print(f"{seed - first} random batches, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
