"""Costs of the model in a GGUF file, from its header: config from the metadata, dtypes as mean bits of the tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from slipstream.bench.model_costs import Dtypes, ModelCosts, PlanError, from_config
from slipstream.models.gguf_file import read_gguf

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
}


def from_gguf(path: Path) -> ModelCosts:
    """Costs of the model in `path`. Raises CheckpointError for a damaged file, PlanError for an unknown model."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        raise PlanError(f"{path} holds a {architecture!r} model; plan reads GGUF files of {', '.join(_FAMILIES)}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise PlanError(f"{path} lacks token_embd.weight; is it a whole model?")
    config = {name: file.metadata.get(f"{architecture}.{key}") for name, key in _KEYS.items()}
    config |= {
        "model_type": _FAMILIES[architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }

    def mean_bits(*marks: str) -> str:
        chosen = [t for name, t in file.tensors.items() if name.endswith(".weight") and any(x in name for x in marks)]
        elements = sum(math.prod(t.shape) for t in chosen)
        return f"{8 * sum(t.nbytes for t in chosen) / elements:.6g}-bit" if elements else "bf16"

    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    model = from_config({key: value for key, value in config.items() if value is not None}, path.stem, str(path))
    return replace(
        model,
        dtypes=Dtypes(
            attention=mean_bits("attn_q.", "attn_k.", "attn_v.", "attn_output."),
            experts=mean_bits("_exps."),
            dense_ffn=mean_bits("ffn_gate.", "ffn_up.", "ffn_down."),
            head=mean_bits(head),
        ),
    )
