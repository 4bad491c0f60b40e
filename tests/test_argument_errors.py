"""A wrong argument of any function is an error that names the function and the argument."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import pytest
import torch
from attnops import ops
from attnops.compat import (
    causal_conv1d,
    deep_gemm,
    fla,
    flash_attn,
    flash_attn_interface,
    flash_mla,
    flashinfer,
    sgl_kernel,
)
from attnops.metadata import FmhaPlan, MlaDecodePlan, SparseMlaPlan, XqaDecodePlan
from right_calls import Call, compat_calls, ops_calls
from torch import Tensor

PREFIXES = {"ops": "attnops::{}", "compat": "attnops.compat: {}"}
CALLS = {"ops": ops_calls, "compat": compat_calls}
# Memory that nothing reads: docs/compat.md.
SCRATCH = {"workspace_buffer", "semaphores", "kv_last_page_len"}
NOT_READ = {
    ("trtllm_batch_context_with_kv_cache", "cum_seq_lens_kv"),
    ("trtllm_fmha_v2_prefill", "cum_seq_lens_kv"),
    ("trtllm_ragged_attention_deepseek", "seq_lens"),
    ("xqa_mla", "v_cache"),
    ("fp8_paged_mqa_logits", "schedule_meta"),
}
HELPERS = {
    f"attnops.compat.{name}"
    for name in ("_convert", "_cache_tables", "_varlen", "_extend", "_attend", "_positions", "_plain_cache")
}
NOT_A_TENSOR = [7, "seven", object()]


def call_of(package: str, name: str) -> Call:
    return CALLS[package]()[name]


def cases(kind: type | tuple[type, ...]) -> list[tuple[str, str, str]]:
    """(package, function, argument) of every argument of a right call that is of one of these types."""
    return [
        (package, name, argument)
        for package, calls in CALLS.items()
        for name, (_, given) in calls().items()
        for argument, value in given.items()
        if isinstance(value, kind) and argument not in SCRATCH and (name, argument) not in NOT_READ
    ]


def public_functions(module: ModuleType) -> set[str]:
    """Functions and methods of a module that a user may call, by name."""
    names = set()
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", "") in HELPERS:
            continue
        if inspect.isfunction(value) and value.__module__.startswith("attnops.compat") and name != "names_the_peers":
            names.add(name)
        elif inspect.isclass(value) and name.startswith(("Batch", "Block", "CUDAGraph", "MultiLevel", "Variable")):
            methods = {m: vars(value).get(m) for m in ("plan", "run", "begin_forward", "forward")}
            names |= {name} | {f"{name}.{m}" for m, made in methods.items() if getattr(made, "__name__", "") == m}
    return names


def test_there_is_a_right_call_of_every_function():
    """A new function of `ops` needs a call in `tests/support/right_calls.py`, one of `compat` too."""
    assert ops_calls().keys() == set(ops.__all__), "add the call to ops_calls() of tests/support/right_calls.py"
    modules = (causal_conv1d, deep_gemm, fla, flash_attn, flash_attn_interface, flash_mla, flashinfer, sgl_kernel)
    assert compat_calls().keys() == set.union(*map(public_functions, modules))


def test_every_function_of_ops_is_exported():
    """What `__all__` lacks has no reference, and no test here spoils its arguments."""
    wrapped = {
        name
        for module in pkgutil.iter_modules(ops.__path__)
        for name, value in vars(importlib.import_module(f"attnops.ops.{module.name}")).items()
        if hasattr(value, "__wrapped__") and value.__module__ == f"attnops.ops.{module.name}" and name[0] != "_"
    }
    assert wrapped <= set(ops.__all__), "add it to __all__ of attnops/ops/__init__.py"


def test_every_op_with_a_function_has_a_fake():
    for name in ops.__all__:
        if hasattr(torch.ops.attnops, name):
            found = torch._C._dispatch_has_kernel_for_dispatch_key(f"attnops::{name}", "Meta")
            assert found, f'no fake: add register_fake("{name}") to its module in attnops/ops'


@pytest.mark.parametrize("package, name", [(package, name) for package in CALLS for name in CALLS[package]()])
def test_right_calls_are_right(package, name):
    function, given = call_of(package, name)
    function(**given)


@pytest.mark.parametrize("package, name, argument", cases(Tensor))
def test_what_is_no_tensor_is_named(package, name, argument):
    """None is one, too, where the argument may not be left out."""
    function, given = call_of(package, name)
    hint = str(inspect.signature(function).parameters[argument].annotation)
    for wrong in [*NOT_A_TENSOR, *([] if "None" in hint else [None])]:
        if "int" in hint and wrong == 7:
            continue  # lengths may be one number
        with pytest.raises(Exception) as raised:
            function(**{**given, argument: wrong})
        expected = re.escape(PREFIXES[package].format(name)) + rf".*\b{argument}\b must be .*Tensor.*, got "
        assert re.search(expected, str(raised.value)), raised.value
        assert isinstance(raised.value, TypeError)


@pytest.mark.parametrize("package, name, argument", cases((XqaDecodePlan, MlaDecodePlan, SparseMlaPlan, FmhaPlan)))
def test_what_is_no_plan_is_named(package, name, argument):
    function, given = call_of(package, name)
    for wrong in (None, "plan", 3, FmhaPlan.allocate(1, 1) if not isinstance(given["plan"], FmhaPlan) else ()):
        kinds = r"(Xqa|Mla|SparseMla|Fmha)\w*Plan( or Block\w+Plan)?"
        with pytest.raises(TypeError, match=rf"attnops::{name}: plan must be {kinds}, got "):
            function(**{**given, "plan": wrong})


@pytest.mark.parametrize("package, name, argument", [case for case in cases(Tensor) if case[0] == "ops"])
def test_a_meta_tensor_among_real_ones_is_no_call_that_does_nothing(package, name, argument):
    function, given = call_of(package, name)
    if sum(isinstance(value, Tensor) for value in given.values()) == 1 and "plan" not in given:
        return  # nothing else has a device
    with pytest.raises(RuntimeError, match=rf"attnops::{name}: \w+ must be on (cpu|meta) as \w+, got (cpu|meta)"):
        function(**{**given, argument: given[argument].to("meta")})


@pytest.mark.parametrize("name", ["xqa_decode", "mla_decode", "store_kv", "merge_state", "fmha_paged"])
def test_none_for_a_tensor_of_the_raw_op(name):
    """torch's parser lets None pass for a tensor; the op does not."""
    schema = getattr(torch.ops.attnops, name).default._schema
    _, given = ops_calls()[name]
    plan = given.pop("plan", None)
    of_plan = {} if plan is None else {key: value for key, value in vars(plan).items() if isinstance(value, Tensor)}
    q = given.get("q")
    if name.endswith("decode"):
        of_plan["fixed_split_tokens"], given["q"] = 0, q.unsqueeze(1)
        given |= {"out": q.new_empty(3, 1, q.shape[1], 512 if name == "mla_decode" else 64), "lse": None}
    elif name == "fmha_paged":
        given |= {"out": torch.empty_like(q), "tile_q": plan.tile_q, "lse": None, "kv_indptr": None}
    elif name == "merge_state":
        given |= {"out": given["out_a"].clone(), "lse": given["lse_a"].clone()}
    given |= of_plan | ({"softmax_scale": 0.1} if q is not None else {})
    absent = {"q_pe": None, "kv_indptr": None} if name.endswith("decode") else {}
    given = absent | given
    known = {argument.name: str(argument.type) for argument in schema.arguments}
    given = {key: value for key, value in given.items() if key in known}
    getattr(torch.ops.attnops, name)(**given)
    for argument, kind in known.items():
        if kind == "Tensor":
            with pytest.raises(RuntimeError, match=rf"attnops::{name}: {argument} must .*, got None"):
                getattr(torch.ops.attnops, name)(**{**given, argument: None})


@pytest.mark.parametrize(
    ("name", "argument", "wrong"),
    [
        ("xqa_decode", "out", lambda t: t[:2]),
        ("xqa_decode", "out", lambda t: t.unsqueeze(0).unsqueeze(0)),
        ("xqa_decode", "lse", lambda t: t[:2]),
        ("xqa_decode", "tree_mask", lambda t: torch.ones(4, 1, dtype=torch.uint8)),
        ("mla_decode", "out", lambda t: torch.empty(2, 5, 512, dtype=torch.bfloat16)),
        ("mla_decode", "lse", lambda t: torch.empty(4, 5)),
        ("mla_decode", "q_pe", lambda t: torch.empty(4, 5, 64, dtype=torch.bfloat16)),
    ],
)
def test_destinations_and_masks_of_another_shape(name, argument, wrong):
    function, given = ops_calls()[name]
    with pytest.raises((RuntimeError, ValueError), match=rf"attnops::{name}: {argument}.* must .*, got \d"):
        function(**{**given, argument: wrong(given.get(argument))})


LIMITS = [
    ("batch_size", -1, r"must be in \[0, "),
    ("seqlen_q", 0, r"must be in \[1, 65536\], got 0"),
    ("window_left", -2, r"must be in \[-1, 2147418111\], got -2"),
    ("num_sm_parts", 0, r"must be in \[1, 65535\], got 0"),
    ("max_seqlen_k", -1, r"must be in \[0, "),
    ("num_q_heads", 0, r"must be in \[1, "),
    ("fixed_split_tokens", 65, "must be 0 .*positive multiple of 64 .*, got 65"),
]


@pytest.mark.parametrize("plan", [XqaDecodePlan, MlaDecodePlan])
@pytest.mark.parametrize("argument, wrong, message", LIMITS)
def test_limits_of_a_plan(plan, argument, wrong, message):
    options = {"batch_size": 2, "num_q_heads": 8}
    if plan is XqaDecodePlan:
        options |= {"num_kv_heads": 2, "head_dim": 64}
    with pytest.raises(ValueError, match=rf"{plan.__name__}\.allocate: {argument} {message}"):
        plan.allocate(**{**options, argument: wrong})
    with pytest.raises(TypeError, match=rf"{plan.__name__}\.allocate: {argument} must be an int, got str 'two'"):
        plan.allocate(**{**options, argument: "two"})


# What an op below finds is told in the words of the function that was called.
TRANSLATED = [
    ("trtllm_batch_decode_with_kv_cache", "block_tables", "page_table is block_tables"),
    ("xqa", "page_table", "attnops.compat: xqa: attnops::xqa_decode: page_table must have dtype int32"),
    ("flash_attn_with_kvcache", "page_table", "flash_attn_with_kvcache: attnops::xqa_decode: page_table must have"),
    ("flash_mla_with_kvcache", "block_table", "page_table is block_table"),
    ("trtllm_batch_decode_with_kv_cache_mla", "block_tables", "page_table is block_tables"),
    ("cutlass_mla_decode", "page_table", "cutlass_mla_decode: attnops::mla_decode: page_table must have dtype int32"),
]


@pytest.mark.parametrize("name, argument, message", TRANSLATED)
def test_errors_of_the_op_below_are_in_the_words_of_the_peer(name, argument, message):
    function, given = compat_calls()[name]
    with pytest.raises(RuntimeError, match=re.escape(message)):
        function(**{**given, argument: given[argument].float()})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("BatchDecodeWithPagedKVCacheWrapper", {"kv_layout": "NDH"}, "kv_layout must be NHD or HND, got 'NDH'"),
        ("BatchDecodeWithPagedKVCacheWrapper.plan", {"indptr": torch.zeros(3).int()}, r"indptr must be \[B \+ 1\]"),
        ("BatchDecodeWithPagedKVCacheWrapper.plan", {"page_size": 0}, "page_size must be at least 1, got 0"),
        ("BatchDecodeWithPagedKVCacheWrapper.plan", {"q_data_type": "bf17"}, "q_data_type must be a torch.dtype"),
        ("BatchDecodeWithPagedKVCacheWrapper.plan", {"indices": torch.zeros(2, 3).int()}, r"indices must be \[num_ind"),
        ("BatchDecodeWithPagedKVCacheWrapper.run", {"lse": torch.zeros(8, 3)}, r"lse must be float32 \[3, 8\]"),
        ("BatchMLAPagedAttentionWrapper.plan", {"qo_indptr": torch.arange(3)}, r"qo_indptr and kv_indptr must be \[B"),
        ("BatchMLAPagedAttentionWrapper.run", {"lse": torch.zeros(5, 3)}, r"lse must be float32 \[3, 5\]"),
        ("trtllm_batch_decode_with_kv_cache", {"seq_lens": torch.ones(3)}, "seq_lens must have dtype int32 or int64"),
        ("trtllm_batch_decode_with_kv_cache", {"mask": torch.ones(3, 1, 1, dtype=torch.bool)}, "mask must be uint16"),
        ("trtllm_batch_decode_with_kv_cache", {"sinks": torch.ones(8).bool()}, "sinks must have a float dtype"),
        ("trtllm_batch_decode_with_kv_cache", {"q_len_per_req": 2}, "query must have 6 rows"),
        ("trtllm_batch_decode_with_kv_cache", {"q_len_per_req": 0}, "at least 1 query token, got 0"),
        ("trtllm_batch_decode_with_kv_cache_mla", {"bmm2_scale": 0.0}, "bmm2_scale must not be 0"),
        ("xqa", {"output": torch.empty(3, 8, 64)}, r"output must be \[3, 1, 8, 64\] as q"),
        ("flash_attn_with_kvcache", {"max_seqlen_q": 2}, r"max_seqlen_q must be 1 \(q.shape\[1\]\)"),
        ("flash_mla_with_kvcache", {"num_splits": torch.zeros(4).int()}, "num_splits beside a FlashMLASchedMeta"),
        ("flash_mla_with_kvcache", {"attn_sink": torch.zeros(4)}, "attn_sink must hold 5 logits"),
        ("cutlass_mla_get_workspace_size", {"num_batches": -1}, "num_batches must be at least 0, got -1"),
    ],
)
def test_what_only_a_compat_function_can_say(name, change, message):
    function, given = compat_calls()[name]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=rf"attnops.compat: {name}.*{message}"):
        function(**{**given, **change})
