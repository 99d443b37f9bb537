"""Tiny random models of transformers, one of each sparse family and of what it can vary, saved to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = YARN | {"mscale": 0.8, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 1}
QWEN = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "intermediate_size": 32}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
MIMO = {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MIMO |= {"sliding_window": 9, "num_key_value_heads": 1, "num_hidden_layers": 7}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
INDEX = {"index_topk": 11, "index_head_dim": 16, "index_n_heads": 16}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", QWEN),
    "qwen3_moe normalised, dense layer, window": (
        "Qwen3Moe",
        QWEN | {"norm_topk_prob": True, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "gpt_oss": ("GptOss", OSS),
    "gpt_oss no attention bias": ("GptOss", OSS | {"attention_bias": False, "swiglu_limit": 0.5}),
    "mimo_v2_flash": ("MiMoV2Flash", MIMO),
    "mimo_v2_flash groups": ("MiMoV2Flash", MIMO | {"n_group": 2, "attention_value_scale": None}),
    "glm4_moe": ("Glm4Moe", GLM),
    "glm4_moe biases, head norms": ("Glm4Moe", GLM | {"attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "deepseek_v3 yarn": ("DeepseekV3", LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3 whole queries": ("DeepseekV3", LATENT | {"q_lora_rank": None}),
    "deepseek_v32": ("DeepseekV32", LATENT | INDEX),
    "deepseek_v32 yarn": ("DeepseekV32", LATENT | INDEX | {"rope_parameters": DEEPSEEK_YARN}),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | INDEX | {"rms_norm_eps": 1e-5}),
    "glm_moe_dsa shared": (
        "GlmMoeDsa",
        LATENT | INDEX | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
}


def build(name: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A random model with nothing left at 0 or 1, the buffers of its routers included."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**BASE | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def saved(path: Path, name: str, changes: dict[str, Any]) -> Any:
    """`build`, saved to `path` too."""
    model = build(name, changes)
    model.save_pretrained(path)
    return model


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """(n, vocab), after each of n tokens."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
