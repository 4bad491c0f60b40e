"""Four small language models of transformers with random weights: Llama, Gemma, GPT-OSS and DeepSeek in kind."""

from __future__ import annotations

import torch

COMMON = {
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token, unless that is small
    "initializer_range": 0.25,  # the greedy choice is then far from a tie
}
KINDS = ("llama", "gemma", "gpt_oss", "deepseek")


def config(kind: str):
    """A configuration; windows are shorter than the tests' sequences."""
    import transformers

    if kind == "llama":
        return transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=32, **COMMON
        )
    if kind == "gemma":  # soft cap, and a window in every other layer
        return transformers.Gemma2Config(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=7,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=None,
            **COMMON | {"tie_word_embeddings": True},  # vLLM's Gemma knows no other
        )
    if kind == "gemma4":  # a window and head dim 64, then all keys and head dim 512
        return transformers.Gemma4TextConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            global_head_dim=512,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            **COMMON | {"tie_word_embeddings": True},
        )
    if kind == "gpt_oss":  # sinks, and a window in every other layer
        return transformers.GptOssConfig(
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            **COMMON,
        )
    if kind in ("deepseek", "deepseek_576", "deepseek_192", "deepseek_yarn"):
        # MLA. transformers expands keys and values: head dims of 48 and 32. Engines absorb: latents of 512, 64 of rope.
        # Prompts of vLLM on a GPU: head dims of 192 and 128 alone.
        narrow, head_dim = kind == "deepseek", 128 if kind == "deepseek_192" else 64
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
        yarn |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        return transformers.DeepseekV3Config(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=64,
            kv_lora_rank=64 if narrow else 512,
            qk_nope_head_dim=32 if narrow else head_dim,
            qk_rope_head_dim=16 if narrow else 64,
            v_head_dim=32 if narrow else head_dim,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1 if narrow else 2,
            rope_parameters=yarn if kind == "deepseek_yarn" else None,
            **COMMON,
        )
    raise ValueError(f"no tiny model of kind {kind!r}")


def model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A model in eval mode, its sinks random, too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(config(kind), dtype=dtype).eval()
    if built.config.tie_word_embeddings:
        built.get_input_embeddings().weight.data.mul_(0.02)
    for name, parameter in built.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_()
    return built.requires_grad_(False)


def prompts(batch_size: int, length: int, seed: int = 1) -> torch.Tensor:
    """int64 ``[batch_size, length]`` of tokens that are neither padding nor the end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, COMMON["vocab_size"], (batch_size, length), generator=generator)
