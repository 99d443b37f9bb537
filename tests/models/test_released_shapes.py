"""Specs of released models at their true shapes: the parameters that the plan counts, and transformers builds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.bench.model_costs import described_models, load_model
from slipstream.models.families import FAMILIES, Fields
from slipstream.models.spec import ModelSpec

KNOWN = {kind: family.hf for family in FAMILIES for kind in family.hf.types}
UNCOUNTED = ("correction", "index_k_norm", "index_k_norm_bias")  # buffers, and norms that the plan leaves out


class Endless(dict[str, Any]):
    """Stored tensors that bound no count."""

    def __len__(self) -> int:
        return 1 << 20


def released(name: str) -> ModelSpec:
    config = described_models()[name]
    return KNOWN[config["model_type"]].spec(Fields(name, config), Endless())


@pytest.mark.parametrize("name", [n for n, config in described_models().items() if config["model_type"] in KNOWN])
def test_a_released_shape_has_the_parameters_that_the_plan_counts(name: str) -> None:
    shapes = released(name).tensor_shapes()
    total, costs = sum(map(math.prod, shapes.values())), load_model(name).total_params
    uncounted = sum(math.prod(shape) for key, shape in shapes.items() if key.endswith(UNCOUNTED))
    assert total - uncounted <= costs <= total


def test_the_layers_of_naive_are_where_its_card_says() -> None:
    layers = released("naive-n05-flash").layers
    assert [i for i, x in enumerate(layers) if x.attention.kind == "sparse"] == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    sparse, sliding = layers[0].attention, layers[1].attention
    assert (sparse.kv_heads, sparse.head_dim, sparse.value_dim, sparse.rope.dim, sparse.sinks) == (
        4,
        192,
        128,
        64,
        True,
    )
    assert (sliding.kv_heads, sliding.window, sliding.sinks) == (8, 128, True)
    assert sparse.indexer is not None
    assert (sparse.indexer.heads, sparse.indexer.head_dim, sparse.indexer.top_k) == (16, 128, 2048)
    assert layers[0].feed_forward.inner == 16384
    assert layers[1].feed_forward.experts is not None
    assert (layers[1].feed_forward.experts.count, layers[1].feed_forward.experts.top_k) == (256, 8)
