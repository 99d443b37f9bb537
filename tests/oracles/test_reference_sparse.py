"""The reference against transformers: every sparse family, loaded from what transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import CASES, logits_of, saved  # noqa: E402 - needs both

from slipstream.models.checkpoint import load_checkpoint  # noqa: E402
from slipstream.models.reference import Reference  # noqa: E402

LENGTH = 48  # past every window and selection of the cases
TOLERANCE = 1e-5  # a wrong epsilon in a norm of a latent is 2e-5


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def decoded_in_rounds(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """Logits after each token, from rounds of 8 rows: the first 1, 2, .. 8 are right, the rest wrong and dropped."""
    memory, rows, right = reference.memory(len(tokens) + 8), [], 0
    rows.append(reference.logits(tokens[:5], memory))
    while memory.length < len(tokens):
        at, right = memory.length, right % 8 + 1
        drafts = tokens[at : at + right]
        wrong = [(token + 1) % reference.spec.vocab for token in tokens[at : at + 8 - len(drafts)]]
        rows.append(reference.logits([*drafts, *wrong], memory)[: len(drafts)])
        memory.length = at + len(drafts)
    return torch.cat(rows)


@pytest.mark.parametrize("case", CASES)
def test_every_sparse_family_equals_transformers(tmp_path: Path, case: str) -> None:
    model = saved(tmp_path, *CASES[case])
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.spec.family == case.split()[0]
    tokens = np.random.default_rng(1).integers(0, checkpoint.spec.vocab, LENGTH).tolist()
    expected = logits_of(model, tokens)
    reference = Reference(checkpoint.spec, checkpoint.tensors)
    assert relative_error(reference.logits(tokens), expected) < TOLERANCE  # prefill
    memory = reference.memory(LENGTH)
    one_by_one = torch.cat([reference.logits([token], memory) for token in tokens])
    assert relative_error(one_by_one, expected) < TOLERANCE
    assert relative_error(decoded_in_rounds(reference, tokens), expected) < TOLERANCE


def test_mimo_as_its_hub_config_says_it_is_the_same_model(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["mimo_v2_flash"])
    spec = load_checkpoint(tmp_path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    ropes, kinds, mixtures = config.pop("rope_parameters"), config.pop("layer_types"), config.pop("mlp_layer_types")
    config |= {
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": 0.334,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in mixtures],
        "sliding_window_size": config.pop("sliding_window") - 1,
        "layernorm_epsilon": config.pop("rms_norm_eps"),
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 24,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(tmp_path).spec == spec
