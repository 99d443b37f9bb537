"""Naive-N0.5-Flash, which transformers lacks: a reference of its own, written from the model's description alone.

It shares nothing with `slipstream.models.reference`: one token at a time, loops over heads and keys, numpy in float64,
weights by their stored names. It derives from MiMo-V2-Flash, whose transformers model it must equal while every global
layer's selection holds the whole text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import write_tiny_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import CASES, logits_of, saved  # noqa: E402 - needs both

from slipstream.models.checkpoint import load_checkpoint  # noqa: E402
from slipstream.models.reference import Reference  # noqa: E402

WINDOW, TOP_K, LENGTH = 8, 12, 30
CONFIG: dict[str, Any] = {"layers": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
CONFIG |= {"attention_value_scale": 0.7, "swa_rope_theta": 500.0, "rope_theta": 9000.0, "routed_scaling_factor": 1.5}


def naive_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits (n, vocab) of the checkpoint at `path`, token by token."""
    from safetensors.numpy import load_file

    c = json.loads((path / "config.json").read_text())
    w = {name: values.astype(np.float64) for name, values in load_file(path / "model.safetensors").items()}
    heads, head_dim, v_dim = c["num_attention_heads"], c["head_dim"], c["v_head_dim"]
    past: list[list[tuple[Any, ...]]] = [[] for _ in range(c["num_hidden_layers"])]

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean() + c["rms_norm_eps"]) * weight

    def rope(x: Any, position: int, base: float) -> Any:
        dim = int(head_dim * 0.334)
        out = x.copy()
        for j in range(dim // 2):
            angle = position * base ** (-2 * j / dim)
            a, b = x[j], x[j + dim // 2]
            out[j] = a * np.cos(angle) - b * np.sin(angle)
            out[j + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def mlp(x: Any, at: str) -> Any:
        gate = w[at + "gate_proj.weight"] @ x
        return w[at + "down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (w[at + "up_proj.weight"] @ x))

    def selection(x: Any, position: int, at: str, index_keys: list[Any]) -> list[int]:
        """The TOP_K positions of the highest index scores."""
        q = (w[at + "wq_b.weight"] @ x).reshape(c["index_n_heads"], -1)
        weights = w[at + "weights_proj.weight"] @ x
        scores = np.zeros(len(index_keys))
        for h in range(len(q)):
            turned = rope(q[h], position, c["rope_theta"])
            for t, key in enumerate(index_keys):
                scores[t] += weights[h] * max(turned @ key, 0.0)
        return sorted(range(len(scores)), key=lambda t: (-scores[t], t))[: c["index_topk"]]

    def attention(x: Any, layer: int, position: int) -> Any:
        at = f"model.layers.{layer}.self_attn."
        sliding = bool(c["hybrid_layer_pattern"][layer])
        kv_heads = c["num_key_value_heads"] * (2 if sliding else 1)
        base = c["swa_rope_theta"] if sliding else c["rope_theta"]
        q = (w[at + "q_proj.weight"] @ x).reshape(heads, head_dim)
        k = (w[at + "k_proj.weight"] @ x).reshape(kv_heads, head_dim)
        v = (w[at + "v_proj.weight"] @ x).reshape(kv_heads, v_dim) * c["attention_value_scale"]
        index_key = None
        if not sliding:
            key = w[at + "indexer.wk.weight"] @ x
            key = (key - key.mean()) / np.sqrt(key.var() + 1e-6)
            key = key * w[at + "indexer.k_norm.weight"] + w[at + "indexer.k_norm.bias"]
            index_key = rope(key, position, base)
        past[layer].append(([rope(head, position, base) for head in k], v, index_key))
        seen = list(range(max(0, position - WINDOW + 1), position + 1))
        if not sliding:
            seen = selection(x, position, at + "indexer.", [entry[2] for entry in past[layer]])
        out = []
        for h in range(heads):
            group, turned = h * kv_heads // heads, rope(q[h], position, base)
            scores = np.array([turned @ past[layer][t][0][group] for t in seen]) / np.sqrt(head_dim)
            shares = np.exp(scores) / (np.exp(scores).sum() + np.exp(w[at + "attention_sink_bias"][h]))
            out.append(sum(share * past[layer][t][1][group] for share, t in zip(shares, seen, strict=True)))
        return w[at + "o_proj.weight"] @ np.concatenate(out)

    def experts(x: Any, layer: int) -> Any:
        at = f"model.layers.{layer}.mlp."
        if not c["moe_layer_freq"][layer]:
            return mlp(x, at)
        scores = 1 / (1 + np.exp(-(w[at + "gate.weight"] @ x)))
        ranked = scores + w[at + "gate.e_score_correction_bias"]
        groups = ranked.reshape(c["n_group"], -1)
        best = sorted(range(len(groups)), key=lambda g: -np.sort(groups[g])[-2:].sum())[: c["topk_group"]]
        allowed = [e for e in range(len(ranked)) if e // groups.shape[1] in best]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[: c["num_experts_per_tok"]]
        total = scores[chosen].sum()
        return c["routed_scaling_factor"] * sum(scores[e] / total * mlp(x, f"{at}experts.{e}.") for e in chosen)

    rows = []
    for position, token in enumerate(tokens):
        x = w["model.embed_tokens.weight"][token]
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + attention(norm(x, w[at + "input_layernorm.weight"]), layer, position)
            x = x + experts(norm(x, w[at + "post_attention_layernorm.weight"]), layer)
        rows.append(w["lm_head.weight"] @ norm(x, w["model.norm.weight"]))
    return np.stack(rows)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("naive"), "naive_n05_flash", **CONFIG)


TOKENS = np.random.default_rng(2).integers(0, 288, LENGTH).tolist()


def test_naive_equals_its_description_past_window_and_selection(path: Path) -> None:
    checkpoint = load_checkpoint(path)
    assert [layer.attention.kind for layer in checkpoint.spec.layers] == ["sparse", "sliding"] * 2
    expected = torch.from_numpy(naive_logits(path, TOKENS)).float()
    reference = Reference(checkpoint.spec, checkpoint.tensors)
    assert (reference.logits(TOKENS) - expected).abs().max() / expected.abs().max() < 1e-4
    memory, rows = reference.memory(LENGTH + 8), []
    while memory.length < LENGTH:  # rounds of 8 rows, of which the last 5 are rejected
        at = memory.length
        rows.append(reference.logits([*TOKENS[at : at + 3], 7, 7, 7, 7, 7], memory)[:3])
        memory.length = at + 3
    assert (torch.cat(rows) - expected).abs().max() / expected.abs().max() < 1e-4


def test_a_selection_changes_logits_from_the_first_token_it_drops(path: Path, tmp_path: Path) -> None:
    sparse = load_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"index_topk": LENGTH}))
    everything = load_checkpoint(tmp_path)
    a, b = (Reference(c.spec, c.tensors).logits(TOKENS) for c in (sparse, everything))
    differs = ((a - b).abs().amax(1) > 1e-4).tolist()
    assert differs.index(True) == TOP_K
    assert all(differs[TOP_K + 4 :])


def test_naive_is_mimo_while_the_selection_holds_the_whole_text(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    name, changes = CASES["mimo_v2_flash"]
    model = saved(tmp_path, name, changes)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    rng, hidden = np.random.default_rng(0), config["hidden_size"]
    shapes = {"wq_b.weight": (16 * 16, hidden), "wk.weight": (16, hidden), "weights_proj.weight": (16, hidden)}
    shapes |= {"k_norm.weight": (16,), "k_norm.bias": (16,)}
    for i, kind in enumerate(config["layer_types"]):
        if kind == "full_attention":  # a sink too low to count, as mimo has none here
            weights[f"model.layers.{i}.self_attn.attention_sink_bias"] = np.full(4, -1e9, np.float32)
            for part, shape in shapes.items():
                key = f"model.layers.{i}.self_attn.indexer.{part}"
                weights[key] = rng.standard_normal(shape).astype(np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    config |= {"model_type": "naive_n05_flash", "index_n_heads": 16, "index_head_dim": 16, "index_topk": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(tmp_path)
    tokens = rng.integers(0, 97, 48).tolist()
    error = (Reference(checkpoint.spec, checkpoint.tensors).logits(tokens) - logits_of(model, tokens)).abs().amax(1)
    assert error[:40].max() < 1e-4
    assert error[44:].min() > 1e-4
