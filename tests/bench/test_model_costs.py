"""Costs read from a config are those of the model `transformers` builds from it, parameter for parameter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench.hardware import load_hardware
from slipstream.bench.model_costs import PlanError, described_models, from_config, load_model
from slipstream.bench.plan import Setup, pass_bytes, plan
from slipstream.models.checkpoint import list_models

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


def built_params(config: dict[str, object]) -> int:
    """Parameters of the real model class, built without memory."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        "llama-8b",
        "qwen3-30b-a3b",
        "gpt-oss-120b",
        "mimo-v2-flash",
        "deepseek-v3",
        "deepseek-v3.2",
        "glm-4.5-air",
        "glm-5",
    ],
)
def test_parameters_of_described_models_match_transformers(name: str) -> None:
    config = {k: v for k, v in described_models()[name].items() if k not in ("source", "weights")}
    assert load_model(name).total_params == built_params(config)


TINY = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2", "num_key_value_heads": 2},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8},
        {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ],
    ids=lambda extra: extra["model_type"],
)
def test_parameters_of_saved_configs_match_transformers(extra: dict[str, object], tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(**TINY, **extra).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).total_params == built_params(TINY | extra)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("naive-n05-flash", 309e9, 15.5e9),
        ("mimo-v2.5-pro", 1.02e12, 42e9),
        ("kimi-k2.6", 1.03e12, 32e9),
        ("deepseek-v3", 671e9, 37e9),
    ],
)
def test_sizes_of_described_models_match_their_cards(name: str, total: float, active: float) -> None:
    model = load_model(name)
    assert model.total_params == pytest.approx(total, rel=0.01)
    assert model.active_params == pytest.approx(active, rel=0.03)


def test_layer_kinds_follow_the_config() -> None:
    kinds = [layer.attention.kind for layer in load_model("naive-n05-flash").layers]
    assert [i for i, kind in enumerate(kinds) if kind == "sparse"] == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert kinds.count("sliding") == 39
    qwen = from_config(TINY | {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": False}, "x")
    assert {layer.attention.kind for layer in qwen.layers} == {"full"}
    mistral = from_config(TINY | {"model_type": "mistral", "sliding_window": 8}, "x")
    assert {layer.attention.window for layer in mistral.layers} == {8}


def test_quantization_of_the_config_decides_the_dtypes() -> None:
    fp8 = from_config(TINY | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "x")
    assert (fp8.dtypes.attention, fp8.dtypes.dense_ffn, fp8.dtypes.head) == ("fp8", "fp8", "bf16")
    mxfp4 = from_config(TINY | {"quantization_config": {"quant_method": "mxfp4"}}, "x")
    assert (mxfp4.dtypes.attention, mxfp4.dtypes.experts) == ("bf16", "mxfp4")
    awq = from_config(TINY | {"dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4}}, "x")
    assert (awq.dtypes.attention, awq.dtypes.head) == ("int4", "fp16")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": -4}, "expected a positive integer"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "8 of 4 experts"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
        ({"dtype": "float3"}, "float3"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8'; expected an object"),
        ({"layer_types": "full_attention"}, "expected a list"),
        ({"num_hidden_layers": 10**9}, "fewer than 10,000"),
        ({"text_config": {"vocab_size": None}}, "lacks num_hidden_layers"),
        ({"n_layer": 3, "num_hidden_layers": None}, "lacks num_hidden_layers; .* keys of Llama"),
    ],
)
def test_bad_configs_are_named_in_the_error(config: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_config(TINY | config, "broken")


JUNK = st.sampled_from([None, 0, -1, 1.5, True, 10**30, "x", "", [], [1], [None] * 3, ["x"] * 3, {}, {"a": 1}])
SPARSE = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1], "n_shared_experts": 1}
LATENT = SPARSE | dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 16)
LATENT |= {"v_head_dim": 8, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk_freq": 2}
MORE = ("layer_types", "hybrid_layer_pattern", "mlp_layer_types", "mlp_only_layers", "decoder_sparse_step", "dtype")
MORE += ("text_config", "quantization_config", "indexer_types", "index_skip_topk_offset", "first_k_dense_replace")
MORE += ("sliding_window", "max_window_layers", "use_sliding_window", "model_type", "tie_word_embeddings")
QUANTIZATION = st.dictionaries(
    st.sampled_from(["quant_method", "bits", "load_in_4bit", "config_groups", "modules_to_not_convert", "ignore"]), JUNK
)


@given(
    st.sampled_from([TINY, SPARSE, LATENT]),
    st.sampled_from(["llama", "qwen3", "gpt_oss", "naive_n05_flash", "new_thing"]),
    st.dictionaries(st.sampled_from([*LATENT, *MORE]), JUNK, max_size=3),
    QUANTIZATION,
)
def test_a_config_is_costed_or_refused_whatever_it_holds(
    config: dict[str, object], family: str, odd: dict[str, object], quantization: dict[str, object]
) -> None:
    try:
        costs = from_config(config | {"model_type": family, "quantization_config": quantization} | odd, "odd")
        floor_s = plan(costs, load_hardware("h200"), Setup(context=1)).floor_s
    except PlanError:
        return  # any other error fails
    assert floor_s > 0


@pytest.mark.parametrize("wrapper", ["text_config", "llm_config", "language_config"])
def test_a_language_model_nested_in_a_multimodal_config_costs_what_it_costs_alone(wrapper: str) -> None:
    alone = from_config(TINY | {"model_type": "llama", "dtype": "float16"}, "x")
    assert from_config({"model_type": "see", "dtype": "float16", wrapper: TINY | {"model_type": "llama"}}, "x") == alone


def test_an_unknown_family_is_read_by_its_keys_and_said_to_be() -> None:
    costs = from_config(TINY | {"model_type": "new_thing"}, "x")
    assert costs.total_params == from_config(TINY | {"model_type": "llama"}, "x").total_params
    assert "'new_thing' is not one the package knows" in " ".join(costs.notes)


def test_a_gguf_header_costs_what_its_file_holds() -> None:
    built_in = next((model.path for model in list_models() if model.name == "smollm2"), None)
    if built_in is None:
        pytest.skip("the built-in model is not installed")
    stored, described = load_model(str(built_in)), load_model("smollm2")
    assert stored.layers == described.layers
    assert pass_bytes(stored, Setup(context=1)) == pytest.approx(pass_bytes(described, Setup(context=1)))
    assert sum(pass_bytes(stored, Setup(context=1)).values()) == pytest.approx(98e6, rel=0.02)


def test_a_model_in_the_hub_cache_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(TINY | {"model_type": "llama"}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert load_model("org/tiny").hidden == 32


def test_what_cannot_be_found_or_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no model 'nowhere'.*smollm2"):
        load_model("nowhere")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(PlanError, match="cannot read"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps([1, 2]))
    with pytest.raises(PlanError, match="no JSON object"):
        load_model(str(tmp_path))
