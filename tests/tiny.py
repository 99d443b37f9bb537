"""Writes tiny random models of every family and format, so that most tests run in milliseconds.

    write_tiny_checkpoint(path, family="qwen3")     a directory: config.json, safetensors, tokenizer files
    write_tiny_gguf(path, format="Q4_K")            a .gguf file

The same arguments and seed give the same weights in both (before rounding to the format). The tokenizer is byte-level
BPE with a few merges and ChatML, so any text can be encoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.models.families import FAMILIES, Fields
from slipstream.models.spec import ModelSpec

TINY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TINY_SPARSE_FAMILIES = ("qwen3_moe", "mimo_v2_flash", "naive_n05_flash", "glm4_moe", "deepseek_v3", "deepseek_v32")
TINY_SPARSE_FAMILIES += ("glm_moe_dsa", "gpt_oss")
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
CLASSES |= {"mimo_v2_flash": "MiMoV2Flash", "naive_n05_flash": "NaiveN05Flash", "glm4_moe": "Glm4Moe"}
CLASSES |= {"deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}
CLASSES |= {"gpt_oss": "GptOss"}
FLOAT_FORMATS = ("F32", "F16", "BF16")
GGUF_FORMATS = (*FLOAT_FORMATS, "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "Ġ a", "o n", "Ġ s")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tiny_tokens(vocab: int) -> list[str]:
    """Bytes, merged pieces, specials, then unused padding up to `vocab`."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
    if vocab < len(tokens):
        raise ValueError(f"vocab must be at least {len(tokens)}")
    return tokens + [f"[PAD{i}]" for i in range(len(tokens), vocab)]


def tiny_config(family: str = "llama", layers: int = 2, hidden: int = 64, vocab: int = 288, **changes: Any) -> dict:
    """A config.json: 4 query heads on 2 KV heads; Mistral slides a window of 8; Qwen3 has its own head size.

    Sparse families have 8 experts, as `_sparse_config` says.
    """
    eos = tiny_tokens(vocab).index(EOS)
    config = {
        "model_type": family,
        "architectures": [CLASSES[family] + "ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": family != "mistral",
        "bos_token_id": eos - 1,
        "eos_token_id": eos,
    }
    if family == "mistral":
        config["sliding_window"] = 8
    if family.startswith("qwen3"):
        config["head_dim"] = hidden // 2
    if family in TINY_SPARSE_FAMILIES:
        config |= _sparse_config(family, hidden, layers)
    return config | changes


def _sparse_config(family: str, hidden: int, layers: int) -> dict[str, Any]:
    """8 experts, 2 a token; the first layer dense but for Qwen; windows of 8, selections of 12."""
    config: dict[str, Any] = {"moe_intermediate_size": hidden // 2, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        return config | {"num_experts": 8, "norm_topk_prob": True}
    if family == "gpt_oss":
        del config["moe_intermediate_size"]
        return config | {"head_dim": 32, "num_local_experts": 8, "sliding_window": 8}
    config |= {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    if family.endswith("_flash"):
        config |= {"head_dim": 32, "v_head_dim": 16, "sliding_window": 8, "num_key_value_heads": 1}
        config["hybrid_layer_pattern"] = [i % 2 for i in range(layers)]
        config["moe_layer_freq"] = [min(i, 1) for i in range(layers)]
    if family in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        config |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
        config |= {"v_head_dim": 16, "num_key_value_heads": 4}
    if family in ("naive_n05_flash", "deepseek_v32", "glm_moe_dsa"):
        config |= {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 32}
    return config


def tiny_spec(config: dict) -> ModelSpec:
    return _family(config).hf.spec(Fields("tiny", config), {str(i): None for i in range(1000)})  # type: ignore[misc]


def tiny_weights(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical name -> float32 values: norms near 1, the rest normal with deviation 0.1."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape) + (name.endswith("norm"))).astype(np.float32)
        for name, shape in spec.tensor_shapes().items()
    }


def write_tiny_checkpoint(
    path: Path, family: str = "llama", *, format: str = "F32", seed: int = 0, shards: int = 1, **config: Any
) -> Path:
    """A checkpoint directory at `path`, made by config.json keys or the arguments of `tiny_config`."""
    path.mkdir(parents=True, exist_ok=True)
    full = tiny_config(family, **config)
    hf, spec = _family(full).hf, tiny_spec(full)
    weights = {hf.stored_name(name): value for name, value in tiny_weights(spec, seed).items()}
    weights = stacked(weights, transposed=True)
    (path / "config.json").write_text(json.dumps(full, indent=1))
    names = sorted(weights)
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights, format)
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            write_safetensors(path / file, {name: weights[name] for name in names[i::shards]}, format)
        index = {"weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(path, spec.vocab)
    return path


def stacked(weights: dict[str, np.ndarray], transposed: bool = False) -> dict[str, np.ndarray]:
    """`weights`, those named `name[expert]` put into one tensor; of `.gate` and `.up` the rows in turn."""
    whole = {name: values for name, values in weights.items() if "[" not in name}
    for name in dict.fromkeys(name.partition("[")[0] for name in weights if "[" in name):
        experts = range(sum(other.startswith(name + "[") and not other.endswith(".up") for other in weights))
        if f"{name}[0].gate" in weights:
            each = [np.stack((weights[f"{name}[{e}].gate"], weights[f"{name}[{e}].up"]), axis=1) for e in experts]
            each = [pair.reshape(-1, *pair.shape[2:]) for pair in each]
        else:
            each = [weights[f"{name}[{e}]"] for e in experts]
        whole[name] = np.stack([m.T if transposed else m for m in each])
    return whole


def write_tokenizer(path: Path, vocab: int) -> None:
    """tokenizer.json and tokenizer_config.json as Hugging Face lays them out."""
    tokens = tiny_tokens(vocab)
    ids = {token: i for i, token in enumerate(tokens)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": ids[text], "content": text} | special for text in SPECIALS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [merge.split() for merge in MERGES],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": EOS, "bos_token": SPECIALS[1], "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], format: str = "F32") -> None:
    header, chunks, at = {}, [], 0
    for name, values in tensors.items():
        data = encode_floats(values, format).tobytes()
        header[name] = {"dtype": format, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def encode_floats(values: np.ndarray, format: str) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    if format == "F32":
        return values
    if format == "F16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # round to nearest even


def write_tiny_gguf(
    path: Path, family: str = "llama", *, format: str = "Q4_1", seed: int = 0, pre: str = "smollm", **config: Any
) -> Path:
    """A .gguf file: matrices in `format` (a K-quant's blocks are random but valid), vectors in F32.

    Mistral is written as the llama architecture, as everywhere. A K-quant needs `hidden` to be a multiple of 256,
    which is then its default.
    """
    from gguf import GGUFWriter, RopeScalingType, TokenType

    if format.endswith("_K"):
        config.setdefault("hidden", 256)
    full = tiny_config(family, **config)
    spec, gguf = tiny_spec(full), _family(full | {"model_type": "llama"} if family == "mistral" else full).gguf
    if gguf is None:
        raise ValueError(f"{family} has no GGUF form here")
    attention, arch = spec.layers[0].attention, gguf.types[0]
    writer = GGUFWriter(path, arch)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(len(spec.layers))
    writer.add_feed_forward_length(spec.layers[0].feed_forward.inner)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    if attention.window:
        writer.add_sliding_window(attention.window)
    if experts := spec.layers[0].feed_forward.experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.top_k)
        writer.add_expert_feed_forward_length(spec.layers[0].feed_forward.inner)
    scaling = full.get("rope_scaling", {}).get("rope_type")
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(scaling))
        writer.add_rope_scaling_factor(full["rope_scaling"]["factor"])
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["rope_scaling"]["original_max_position_embeddings"])
    if scaling == "llama3":  # stored as what divides the unscaled frequencies
        plain = tiny_spec(full | {"rope_scaling": None}).layers[0].attention.rope.inv_freq
        writer.add_tensor("rope_freqs.weight", np.divide(plain, attention.rope.inv_freq).astype(np.float32))
    tokens = tiny_tokens(spec.vocab)
    kinds = [
        TokenType.CONTROL if t in SPECIALS else TokenType.UNUSED if t[:4] == "[PAD" else TokenType.NORMAL
        for t in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(full["eos_token_id"])
    writer.add_bos_token_id(full["bos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    named = {}
    for canonical, values in tiny_weights(spec, seed).items():
        kind = canonical.rpartition(".")[2]
        if gguf.interleaved and kind in ("q", "k"):
            values = interleave(values, attention.heads if kind == "q" else attention.kv_heads)
        named[gguf.stored_name(canonical)] = values
    for name, values in stacked(named).items():
        plain = values.ndim == 1 or name.endswith(".bias")
        add_tensor(writer, name, values, "F32" if plain else format, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: Any, name: str, values: np.ndarray, format: str, seed: int = 0) -> None:
    from gguf import GGMLQuantizationType, quants

    if format == "F32":
        writer.add_tensor(name, values)
        return
    if format.endswith("_K"):
        stored = random_k_blocks(values.shape, format, seed + len(name))
    elif format in FLOAT_FORMATS:
        stored = encode_floats(values, format).view(np.uint8 if format == "BF16" else np.float16)
    else:
        stored = quants.quantize(values, GGMLQuantizationType[format])
    writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[format])


def random_k_blocks(shape: tuple[int, ...], format: str, seed: int = 0) -> np.ndarray:
    """Random super-blocks (rows, bytes) whose values centre on 0 with a deviation of about 0.05."""
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[format]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), np.uint8)
    if format == "Q6_K":  # ... int8 scales (16), d
        blocks[..., 192:208] = rng.integers(-16, 17, (*blocks.shape[:-1], 16)).astype(np.int8).view(np.uint8)
        blocks[..., 208:] = np.array([3e-4], np.float16).view(np.uint8)
    else:  # d, dmin, ... where dmin * mean(m) balances d * mean(scale) * mean(q)
        steps = 16 if format == "Q4_K" else 32
        d = 0.05 / (31 * steps / 3)
        blocks[..., :4] = np.array([d, d * steps / 2], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotate-half rows to the order GGUF stores for llama: pairs (j, j + head_dim/2) side by side."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _family(config: dict) -> Any:
    return next(family for family in FAMILIES if config["model_type"] in family.hf.types)
