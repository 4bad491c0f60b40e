"""nano-vllm, unmodified, over a given `flash_attn`: greedy tokens of a tiny Qwen3. Run as a program.

Arguments: nano-vllm's checkout, a model's folder, "attnops" or "sdpa", and prompts as JSON.

nano-vllm asks for CUDA, NCCL and Triton. On a machine without them this program stands in for all three, around the
engine: `torch.cuda` answers for the CPU, gloo for NCCL, and its one Triton kernel, the store of K and V, is some lines.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types

import torch
import torch.distributed


def stand_in_for_cuda() -> None:
    """A CPU that calls itself a GPU, with 256 MiB of memory."""
    memory = {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **options: None)
    torch.cuda.mem_get_info = lambda *args: (256 << 20, 256 << 20)
    torch.cuda.memory_stats = lambda *args: memory
    torch.Tensor.cuda = lambda self, *args, **options: self
    make, device, group = torch.tensor, torch.set_default_device, torch.distributed.init_process_group
    torch.tensor = lambda *args, pin_memory=False, **options: make(*args, **options)
    torch.set_default_device = lambda name: device("cpu")
    torch.distributed.init_process_group = lambda backend, *args, **options: group("gloo", *args, **options)


def stand_in_for_triton() -> None:
    """`triton.jit` of the store kernel, whose arguments are the cache's rows by slot."""

    class Kernel:
        def __init__(self, function):
            assert function.__name__ == "store_kvcache_kernel", function.__name__

        def __getitem__(self, grid):
            def store(key, key_stride, value, value_stride, k_cache, v_cache, slots, width):
                kept = slots >= 0
                k_cache.view(-1, width)[slots[kept].long()] = key.flatten(1)[kept]
                v_cache.view(-1, width)[slots[kept].long()] = value.flatten(1)[kept]

            return store

    importlib.import_module("torch._dynamo")  # it looks for the real one where there is one
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.language, language.constexpr = Kernel, language, object
    sys.modules |= {"triton": triton, "triton.language": language}


def stand_in_for_tokenizer() -> None:
    import transformers

    transformers.AutoTokenizer.from_pretrained = lambda *args, **options: types.SimpleNamespace(
        eos_token_id=-1, decode=lambda ids: ""
    )


def sdpa_functions(calls: dict[str, int]) -> types.ModuleType:
    """FlashAttention-2's two functions in plain PyTorch, for comparison."""

    def attend(q, k, v, scale):
        mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], **options)[0].transpose(0, 1)

    def pages(cache, table, length):
        return cache[table[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, block_table=None, **options):
        calls["varlen"] += 1
        outs = []
        for i in range(cu_seqlens_q.shape[0] - 1):
            (a, b), (c, d) = cu_seqlens_q[i : i + 2].tolist(), cu_seqlens_k[i : i + 2].tolist()
            keys = [x[c:d] if block_table is None else pages(x, block_table[i], d - c) for x in (k, v)]
            outs.append(attend(q[a:b], *keys, softmax_scale))
        return torch.cat(outs)

    def kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, **options):
        calls["kvcache"] += 1
        rows = []
        for i, length in enumerate(cache_seqlens.tolist()):
            rows.append(attend(q[i], *(pages(x, block_table[i], length) for x in (k_cache, v_cache)), softmax_scale))
        return torch.stack(rows)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, kvcache
    return module


def attnops_functions(calls: dict[str, int]) -> types.ModuleType:
    from attnops.compat import flash_attn

    def counted(name, function):
        @functools.wraps(function)
        def call(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return call

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = counted("varlen", flash_attn.flash_attn_varlen_func)
    module.flash_attn_with_kvcache = counted("kvcache", flash_attn.flash_attn_with_kvcache)
    return module


def main(checkout: str, model: str, kind: str, prompts: list[list[int]]) -> None:
    calls = {"varlen": 0, "kvcache": 0}
    stand_in_for_tokenizer()
    sys.modules["flash_attn"] = (attnops_functions if kind == "attnops" else sdpa_functions)(calls)
    if not torch.cuda.is_available():
        stand_in_for_cuda()
        stand_in_for_triton()
    sys.path.insert(0, checkout)
    from nanovllm import LLM, SamplingParams

    # nano-vllm has no greedy mode: so cold that only the best token is ever drawn.
    cold = SamplingParams(temperature=1e-6, max_tokens=12, ignore_eos=True)
    with torch.inference_mode():  # its sampler divides logits in place, which in float32 are the model's own
        engine = LLM(model, enforce_eager=True, max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=4)
        rounds = [[result["token_ids"] for result in engine.generate(prompts, cold, use_tqdm=False)] for _ in range(2)]
    print("RESULT " + json.dumps({"tokens": rounds, "calls": calls}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
