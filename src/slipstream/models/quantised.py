"""Reads `quantization_config` of a config.json and joins quantised tensors with their scales, by stored name.

FP8 with block scales is the same in every family: `X.weight` in F8_E4M3 beside `X.weight_scale_inv`. MXFP4 experts lie
as their family says, so the family takes them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import CheckpointError
from slipstream.models.families.common import Fields
from slipstream.models.spec import WeightTensor
from slipstream.models.tensors import BlockScaled

_SCALE = "_scale_inv"


def with_scales(config: Fields, stored: Mapping[str, WeightTensor]) -> Mapping[str, WeightTensor]:
    """`stored`, each FP8 tensor joined with its scales. Raises CheckpointError: unknown method, no scales."""
    if "quantization_config" not in config:
        return stored
    settings = config.sub("quantization_config")
    method = settings.text("quant_method", "none")
    if method == "mxfp4":
        return stored
    if method != "fp8" or settings.values.get("fmt", "e4m3") != "e4m3" or "weight_block_size" not in settings:
        raise CheckpointError(
            f"{config.source}: quantization_config of method {ascii(method)[:40]} is not supported; choose weights in "
            "BF16, in FP8 e4m3 with weight_block_size [128, 128], or in MXFP4 as gpt_oss has it"
        )
    block = settings.integers("weight_block_size", 2)
    if block[0] != block[1] or not block[0]:
        raise CheckpointError(f"{config.source}: weight_block_size {block} is not supported; choose square blocks")
    joined = dict(stored)
    for key, tensor in stored.items():
        if tensor.format == "F8_E4M3":
            joined[key] = _joined(config.source, key, tensor, joined.pop(key + _SCALE, None), block[0])
    return joined


def _joined(source: str, key: str, weight: WeightTensor, scales: WeightTensor | None, block: int) -> BlockScaled:
    if scales is None:
        raise CheckpointError(f"{source}: tensor {key + _SCALE!r} is missing; download the checkpoint again")
    expected = tuple(-(-n // block) for n in weight.shape)
    if len(expected) != 2 or scales.shape != expected or scales.format not in ("F32", "BF16", "F16"):
        raise CheckpointError(
            f"{source}: tensor {key + _SCALE!r} is {scales.format} of shape {scales.shape}, not a float for each "
            f"{block}x{block} block of {weight.shape}; download the checkpoint again"
        )
    return BlockScaled(weight, scales, block)
