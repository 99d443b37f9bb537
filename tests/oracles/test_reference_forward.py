"""`models/reference.py` against transformers: tiny random models of every family, and SmolLM2 dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.models.checkpoint import BUILT_IN, Checkpoint, list_models, load_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from slipstream.models.reference import Reference  # noqa: E402 - needs torch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama one KV head": ("Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama rope linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama rope llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window from layer 1": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
}


def written(path: Path, name: str, changes: dict[str, Any], **save: Any) -> Any:
    """A random model of transformers with nothing left at 0 or 1, saved to `path`."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path, **save)
    return model


def theirs(model: Any, tokens: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_every_family_equals_transformers(tmp_path: Path, case: str) -> None:
    model = written(tmp_path, *CASES[case])
    checkpoint = load_checkpoint(tmp_path)
    tokens = np.random.default_rng(1).integers(0, checkpoint.spec.vocab, 40).tolist()  # past every window
    expected = theirs(model, tokens)
    reference = Reference(checkpoint.spec, checkpoint.tensors)
    error = (reference.logits(tokens) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4
    memory = reference.memory(40)
    parts = [reference.logits(tokens[a:b], memory) for a, b in ((0, 1), (1, 17), (17, 18), (18, 40))]
    assert (torch.cat(parts) - expected).abs().max() / expected.abs().max() < 1e-4


def test_sharded_bfloat16_equals_transformers(tmp_path: Path) -> None:
    written(tmp_path / "whole", "Llama", {}).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.tensors["layers.0.q"].format == "BF16"
    tokens = list(range(30))
    expected = theirs(model, tokens)
    ours = Reference(checkpoint.spec, checkpoint.tensors).logits(tokens)
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4


def test_float64_agrees_with_float32(tiny_checkpoint: Path) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint)
    tokens = list(range(20))
    low, high = (
        Reference(checkpoint.spec, checkpoint.tensors, d).logits(tokens) for d in (torch.float32, torch.float64)
    )
    assert high.dtype == torch.float64
    assert (low - high).abs().max() / high.abs().max() < 1e-5


@pytest.fixture(scope="module")
def smollm2() -> tuple[Checkpoint, Any, Any]:
    """The built-in checkpoint, ours, and transformers' Llama made from the same dequantised weights."""
    if list_models()[0].path is None:
        pytest.skip("the built-in weights are not installed")
    checkpoint = load_checkpoint(BUILT_IN)
    spec = checkpoint.spec
    attention = spec.layers[0].attention
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.layers[0].feed_forward.inner,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.norm_eps,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    ours = Reference(spec, checkpoint.tensors)
    names = {
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    state = {"model.embed_tokens.weight": ours.weights["embed"], "model.norm.weight": ours.weights["final_norm"]}
    for name, weight in ours.weights.items():
        if name.startswith("layers."):
            _, i, kind = name.split(".")
            state[f"model.layers.{i}.{names[kind]}.weight"] = weight
    model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state).eval()
    return checkpoint, ours, model


PROMPT = (
    "The history of the lighthouse begins with fires on hilltops. As harbours grew, people built towers so that ships "
    "could find their way at night: Pharos of Alexandria was the most famous. def fib(n): return n if n < 2 else "
    "fib(n - 1) + fib(n - 2). In 1822 Augustin Fresnel's lens multiplied the reach of a lamp by 10. Ça va? 你好! "
)


def test_smollm2_logits_equal_transformers(smollm2: tuple[Checkpoint, Any, Any]) -> None:
    checkpoint, ours, model = smollm2
    tokens = (checkpoint.tokenizer.encode(PROMPT) * 4)[:256]
    assert len(tokens) == 256
    assert (ours.logits(tokens) - theirs(model, tokens)).abs().max() < 2e-3


def test_smollm2_predicts_english(smollm2: tuple[Checkpoint, Any, Any]) -> None:
    """Rows of q and k in the wrong order would agree with transformers above, but not with the language."""
    checkpoint, ours, _ = smollm2
    tokens = checkpoint.tokenizer.encode(
        "Once upon a time, there was a little girl who lived in a small house at the edge of the forest with her "
        "mother and father. Every morning she would walk to the village to buy bread and milk. "
    )
    loss = torch.nn.functional.cross_entropy(ours.logits(tokens[:-1]), torch.tensor(tokens[1:]))
    assert loss < 2.7  # 2.39; in the wrong order 3.16


def test_smollm2_top_choices_agree_with_llama_cpp(smollm2: tuple[Checkpoint, Any, Any]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    checkpoint, ours, _ = smollm2
    tokens = checkpoint.tokenizer.encode(PROMPT)
    peer = llama_cpp.Llama(str(checkpoint.path), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
    peer.eval(tokens)
    agree = (peer.scores[: len(tokens)].argmax(-1) == ours.logits(tokens).argmax(-1).numpy()).mean()
    assert agree > 0.9  # llama.cpp rounds activations to 8 bits


def test_smollm2_decodes_the_same_128_tokens(smollm2: tuple[Checkpoint, Any, Any]) -> None:
    checkpoint, ours, model = smollm2
    chat = checkpoint.tokenizer.render_chat([{"role": "user", "content": "Explain how a lighthouse works."}])
    prompt = checkpoint.tokenizer.encode(chat)
    memory, tokens, fed = ours.memory(len(prompt) + 128), [], prompt
    for _ in range(128):
        tokens.append(int(ours.logits(fed, memory)[-1].argmax()))
        fed = tokens[-1:]
    # Greedy decoding is the same exactly when every token is the other's choice after the same text.
    assert tokens == theirs(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
