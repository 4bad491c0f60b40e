"""Every argument of every paged_kv op, wrong in shape, dtype, stride, device or range, is named in the error."""

import attnops  # noqa: F401  (loads the ops)
import pytest
import torch

I32 = torch.int32
OPS = torch.ops.attnops


def ints(*shape, dtype=I32):
    return torch.zeros(shape, dtype=dtype)


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def requests():
    return {
        "req_to_token": ints(4, 40),
        "req_pool_indices": ints(3),
        "cache_seqlens": ints(3),
        "page_size": 16,
        "slot_map": ints(99),
        "report": ints(8),
    }


GOOD = {
    "build_page_table": lambda: {"page_table": ints(3, 3), **requests()},
    "build_kv_indices": lambda: {
        "kv_indptr": ints(4),
        "kv_indices": ints(9),
        "kv_last_page_len": ints(3),
        **requests(),
    },
    "build_cu_seqlens": lambda: {"cu_seqlens": ints(4), "seqlens": ints(3)},
    "translate_slots": lambda: {"out": ints(5), "slots": ints(5), "slot_map": ints(99), "report": ints(8)},
    "store_kv": lambda: {
        "k_pages": bf16(6, 16, 2, 32).to(torch.float8_e4m3fn),
        "v_pages": bf16(6, 16, 2, 24).to(torch.float8_e4m3fn),
        "k": bf16(5, 2, 32),
        "v": bf16(5, 2, 24),
        "out_cache_loc": ints(5),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(2),
        "report": ints(8),
    },
    "store_mla_kv": lambda: {
        "kv_pages": bf16(6, 16, 576).to(torch.float8_e4m3fn),
        "latent": bf16(5, 512),
        "k_pe": bf16(5, 64),
        "out_cache_loc": ints(5),
        "kv_scale": torch.ones(1),
        "report": ints(8),
    },
}

FP8, FP64 = torch.float8_e4m3fn, torch.float64
REPORT = [
    ("report", ints(7), r"report\.shape\[0\] \(report_size\) must be 8 as in core/report\.h, got 7"),
    ("report", ints(8, dtype=torch.int64), r"report must have dtype int32, got int64"),
    ("report", ints(16)[::2], r"report must be contiguous"),
]
REQUESTS = [
    ("req_to_token", ints(4, 40, 1), r"req_to_token must have 2 dimensions, got 3, shape \[4, 40, 1\]"),
    ("req_to_token", ints(4, 40, dtype=torch.int64), r"req_to_token must have dtype int32, got int64"),
    ("req_to_token", ints(4, 80)[:, ::2], r"req_to_token\.stride\(1\) must be 1 .* got 2"),
    ("req_pool_indices", ints(2), r"req_pool_indices\.shape\[0\] \(batch_size\) must be 3 as in cache_seqlens, got 2"),
    ("req_pool_indices", torch.zeros(3), r"req_pool_indices must have dtype int32 or int64, got float32"),
    ("cache_seqlens", ints(3, 1), r"cache_seqlens must have 1 dimensions, got 2"),
    ("cache_seqlens", ints(3, dtype=torch.int64), r"cache_seqlens must have dtype int32, got int64"),
    ("cache_seqlens", ints(6)[::2], r"cache_seqlens must be contiguous"),
    ("page_size", 0, r"page_size must be in \[1, 2147483647\], got 0"),
    ("page_size", -16, r"page_size must be in \[1, 2147483647\], got -16"),
    ("slot_map", ints(9, 9), r"slot_map must have 1 dimensions, got 2"),
    ("slot_map", ints(9, dtype=torch.int16), r"slot_map must have dtype int32 or int64, got int16"),
    *REPORT,
]
WRONG = {
    "build_page_table": [
        ("page_table", ints(2, 3), r"page_table\.shape\[0\] \(batch_size\) must be 3 as in cache_seqlens, got 2"),
        ("page_table", ints(3, 3, dtype=torch.int64), r"page_table must have dtype int32, got int64"),
        ("page_table", ints(3, 6)[:, ::2], r"page_table\.stride\(1\) must be 1 .* got 2"),
        *REQUESTS,
    ],
    "build_kv_indices": [
        ("kv_indptr", ints(3), r"kv_indptr\.shape\[0\] \(batch_size \+ 1\) must be 4 as in cache_seqlens, got 3"),
        ("kv_indptr", ints(4, dtype=torch.int64), r"kv_indptr must have dtype int32, got int64"),
        ("kv_indptr", ints(8)[::2], r"kv_indptr must be contiguous"),
        ("kv_indices", ints(3, 3), r"kv_indices must have 1 dimensions, got 2"),
        ("kv_indices", ints(9, dtype=torch.int64), r"kv_indices must have dtype int32, got int64"),
        ("kv_indices", ints(18)[::2], r"kv_indices must be contiguous"),
        ("kv_last_page_len", ints(4), r"kv_last_page_len\.shape\[0\] \(batch_size\) must be 3 .* got 4"),
        ("kv_last_page_len", ints(3, dtype=torch.int64), r"kv_last_page_len must have dtype int32, got int64"),
        ("kv_last_page_len", ints(6)[::2], r"kv_last_page_len must be contiguous"),
        *REQUESTS,
    ],
    "build_cu_seqlens": [
        ("cu_seqlens", ints(3), r"cu_seqlens\.shape\[0\] \(batch_size \+ 1\) must be 4 as in seqlens, got 3"),
        ("cu_seqlens", ints(4, dtype=torch.int64), r"cu_seqlens must have dtype int32, got int64"),
        ("cu_seqlens", ints(8)[::2], r"cu_seqlens must be contiguous"),
        ("seqlens", ints(3, 1), r"seqlens must have 1 dimensions, got 2"),
        ("seqlens", ints(3, dtype=torch.int64), r"seqlens must have dtype int32, got int64"),
        ("seqlens", ints(6)[::2], r"seqlens must be contiguous"),
    ],
    "translate_slots": [
        ("out", ints(4), r"out\.shape\[0\] \(num_tokens\) must be 5 as in slots, got 4"),
        ("out", torch.zeros(5), r"out must have dtype int32 or int64, got float32"),
        ("slots", ints(5, 1), r"slots must have 1 dimensions, got 2"),
        ("slots", ints(5, dtype=torch.uint8), r"slots must have dtype int32 or int64, got uint8"),
        ("slot_map", ints(9, 9), r"slot_map must have 1 dimensions, got 2"),
        ("slot_map", torch.zeros(9), r"slot_map must have dtype int32 or int64, got float32"),
        *REPORT,
    ],
    "store_kv": [
        ("k_pages", bf16(6, 16, 3, 32).to(FP8), r"k_pages\.shape\[2\] \(num_heads\) must be 2 as in k, got 3"),
        ("k_pages", bf16(6, 16, 32).to(FP8), r"k_pages must have 4 dimensions, got 3"),
        ("k_pages", bf16(6, 0, 2, 32).to(FP8), r"k_pages\.shape\[1\] \(page_size\) must be at least 1 .* got 0"),
        (
            "k_pages",
            bf16(6, 16, 2, 32).half(),
            r"k_pages must have dtype bfloat16 as k, or float8_e4m3fn .* got float16",
        ),
        ("k_pages", bf16(6, 16, 2, 64).to(FP8)[..., ::2], r"k_pages\.stride\(3\) must be 1 .* got 2"),
        ("v_pages", bf16(7, 16, 2, 24).to(FP8), r"v_pages\.shape\[0\] \(num_pages\) must be 6 as in k_pages, got 7"),
        ("v_pages", bf16(6, 8, 2, 24).to(FP8), r"v_pages\.shape\[1\] \(page_size\) must be 16 as in k_pages, got 8"),
        ("v_pages", bf16(6, 16, 2, 25).to(FP8), r"v_pages\.shape\[3\] \(head_dim_v\) must be 24 as in v, got 25"),
        ("v_pages", bf16(6, 16, 2, 24), r"v_pages must have dtype float8_e4m3fn as k_pages, got bfloat16"),
        ("v_pages", bf16(6, 16, 2, 48).to(FP8)[..., ::2], r"v_pages\.stride\(3\) must be 1 .* got 2"),
        ("k", bf16(5, 2, 33), r"k_pages\.shape\[3\] \(head_dim_k\) must be 33 as in k, got 32"),
        ("k", bf16(5, 64), r"k must have 3 dimensions, got 2"),
        ("k", bf16(5, 2, 32).double(), r"k must have dtype float32 or .* got float64"),
        ("k", bf16(5, 2, 64)[..., ::2], r"k\.stride\(2\) must be 1 .* got 2"),
        ("v", bf16(4, 2, 24), r"v\.shape\[0\] \(num_tokens\) must be 5 as in k, got 4"),
        ("v", bf16(5, 3, 24), r"v\.shape\[1\] \(num_heads\) must be 2 as in k, got 3"),
        ("v", bf16(5, 2, 24).half(), r"v must have dtype bfloat16 as k, got float16"),
        ("v", bf16(5, 2, 48)[..., ::2], r"v\.stride\(2\) must be 1 .* got 2"),
        ("out_cache_loc", ints(6), r"out_cache_loc\.shape\[0\] \(num_tokens\) must be 5 as in k, got 6"),
        ("out_cache_loc", torch.zeros(5), r"out_cache_loc must have dtype int32 or int64, got float32"),
        ("k_scale", torch.ones(3), r"k_scale\.shape\[0\] \(num_scales\) must be 1 or 2 \(num_heads\), got 3"),
        ("k_scale", torch.ones(()), r"k_scale must have 1 dimensions, got 0"),
        ("k_scale", torch.ones(1).half(), r"k_scale must have dtype float32, got float16"),
        ("v_scale", torch.ones(0), r"v_scale\.shape\[0\] \(num_scales\) must be 1 or 2 \(num_heads\), got 0"),
        ("v_scale", torch.ones(2).double(), r"v_scale must have dtype float32, got float64"),
        ("v_scale", torch.ones(4)[::2], r"v_scale must be contiguous"),
        *REPORT,
    ],
    "store_mla_kv": [
        ("kv_pages", bf16(6, 16, 512).to(FP8), r"kv_pages\.shape\[2\] \(latent_dim\) must be 576 .* got 512"),
        ("kv_pages", ints(6, 16, 576, dtype=torch.uint8), r"kv_pages\.shape\[2\] \(row_bytes\) must be 656 .* got 576"),
        ("kv_pages", ints(6, 16, 656, dtype=torch.uint8), r"kv_scale must be absent where kv_pages is uint8"),
        ("kv_pages", bf16(96, 576).to(FP8), r"kv_pages must have 3 dimensions, got 2"),
        ("kv_pages", bf16(6, 0, 576).to(FP8), r"kv_pages\.shape\[1\] \(page_size\) must be at least 1 .* got 0"),
        ("kv_pages", bf16(6, 16, 576).half(), r"kv_pages must have dtype bfloat16 as latent, or .* got float16"),
        ("kv_pages", bf16(6, 16, 1152).to(FP8)[..., ::2], r"kv_pages\.stride\(2\) must be 1 .* got 2"),
        ("kv_pages", bf16(6, 16, 576), r"kv_scale must be absent where kv_pages holds the rows' own dtype"),
        ("latent", bf16(5, 576), r"latent\.shape\[1\] \(kv_lora_rank\) must be 512 as in an MLA row with k_pe given"),
        ("latent", bf16(5, 1, 512), r"latent must have 2 dimensions, got 3"),
        ("latent", bf16(5, 512).double(), r"latent must have dtype .* got float64"),
        ("latent", bf16(5, 1024)[:, ::2], r"latent\.stride\(1\) must be 1 .* got 2"),
        ("k_pe", None, r"latent\.shape\[1\] \(latent_dim\) must be 576 as in an MLA row without k_pe, got 512"),
        ("k_pe", bf16(4, 64), r"k_pe\.shape\[0\] \(num_tokens\) must be 5 as in latent, got 4"),
        ("k_pe", bf16(5, 32), r"k_pe\.shape\[1\] \(rope_dim\) must be 64 as in an MLA row, got 32"),
        ("k_pe", bf16(5, 64).half(), r"k_pe must have dtype bfloat16 as latent, got float16"),
        ("k_pe", bf16(5, 128)[:, ::2], r"k_pe\.stride\(1\) must be 1 .* got 2"),
        ("out_cache_loc", ints(6), r"out_cache_loc\.shape\[0\] \(num_tokens\) must be 5 as in latent, got 6"),
        ("out_cache_loc", torch.zeros(5), r"out_cache_loc must have dtype int32 or int64, got float32"),
        ("kv_scale", torch.ones(2), r"kv_scale\.shape\[0\] \(num_scales\) must be 1, got 2"),
        ("kv_scale", torch.ones(1).double(), r"kv_scale must have dtype float32, got float64"),
        *REPORT,
    ],
}
CASES = [(op, *case) for op, cases in WRONG.items() for case in cases]


@pytest.mark.parametrize("op", GOOD)
def test_the_good_arguments_are_accepted(op):
    getattr(OPS, op)(**GOOD[op]())


@pytest.mark.parametrize(("op", "argument", "value", "message"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_wrong_argument_is_named(op, argument, value, message):
    with pytest.raises(RuntimeError, match=f"attnops::{op}: {message}"):
        getattr(OPS, op)(**{**GOOD[op](), argument: value})


@pytest.mark.parametrize("op", GOOD)
def test_every_argument_has_a_wrong_case(op):
    assert {argument for argument, _, _ in WRONG[op]} == set(GOOD[op]())


@pytest.mark.gpu
@pytest.mark.parametrize("op", GOOD)
def test_argument_on_another_device_is_named(op):
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in GOOD[op]().items()}
    getattr(OPS, op)(**on_gpu)
    for name, value in GOOD[op]().items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(RuntimeError, match=rf"attnops::{op}: \w+ must be on (cpu as {name}|.*, got cpu)"):
                getattr(OPS, op)(**{**on_gpu, name: value})
