"""How right the GPU backend is: `python benchmarks/cuda_accuracy.py MODEL.gguf [--verify]`.

Logits of a 512-token prompt and greedy texts against the model's forward pass in float64 with the same weights, then
the exactness gate.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from cuda_decode import encoded, generate

from slipstream.backends.cuda.backend import CudaBackend
from slipstream.kernels import attention, gate_up, head, norm_qkv, projection
from slipstream.models.checkpoint import Checkpoint, load_checkpoint


def reference_logits(backend: CudaBackend, tokens: np.ndarray) -> torch.Tensor:
    """(n, vocab) float64: the kernels' references chained over the whole text."""
    spec, w = backend.spec, backend.weights
    h = w.embed.double()[torch.from_numpy(tokens).long().cuda()]
    for layer, lw in zip(spec.layers, w.layers, strict=True):
        a = layer.attention
        q, k, v = norm_qkv.reference(h, lw.attention_norm, lw.qkv, lw.qkv_bias, lw.head_norm, lw.cos_sin, 0, a.heads,
                                     a.kv_heads, spec.norm_eps)  # fmt: skip
        o = attention.reference(q, k.transpose(0, 1), v.permute(1, 2, 0), 0, a.softmax_scale, a.window)
        h = projection.reference(o.flatten(1), lw.o, h)
        h = projection.reference(gate_up.reference(h, lw.ffn_norm, *lw.gate_up.chunk(2), spec.norm_eps), lw.down, h)
    return head.reference(h, w.final_norm, w.head, spec.norm_eps)


def logits_errors(backend: CudaBackend, checkpoint: Checkpoint) -> tuple[list[float], float]:
    """The relative error at each position of a 512-token prompt, and the share of equal most likely tokens."""
    text = encoded(checkpoint, "copy")[0][:512]
    cache = backend.new_cache(600)
    ours = np.concatenate([backend.verify(cache, text[i : i + 16]).copy() for i in range(0, 512, 16)])
    cache.close()
    expected = reference_logits(backend, text).cpu().numpy()
    errors = np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return errors.tolist(), float((ours.argmax(1) == expected.argmax(1)).mean())


def same_texts(backend: CudaBackend, checkpoint: Checkpoint) -> float:
    """The share of 20 greedy texts of 64 tokens that are the reference's."""
    same = 0
    texts = (encoded(checkpoint, "chat") + encoded(checkpoint, "code") + encoded(checkpoint, "copy"))[:20]
    for prompt in texts:
        out, *_ = generate(backend, prompt, 64, 7, checkpoint.eos_token_ids)
        whole = np.concatenate([prompt, np.array(out, np.int32)])
        same += reference_logits(backend, whole)[len(prompt) - 1 : -1].argmax(-1).tolist() == out
    return same / len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    checkpoint = load_checkpoint(args.model)
    backend = CudaBackend(checkpoint.spec, checkpoint.tensors)
    errors, agreement = logits_errors(backend, checkpoint)
    print("logits: relative error, worst position", max(errors), "mean", np.mean(errors), flush=True)
    print("top-1 agreement", agreement, flush=True)
    print("greedy texts as the float64 reference writes them:", same_texts(backend, checkpoint), flush=True)
    if args.verify:
        from slipstream.bench.verify import verify
        from slipstream.engine.engine import LLM

        for mode in ("exact", "fast"):
            backend.prefill_mode, backend.row_invariant = mode, mode == "exact"
            begun = time.time()
            for check in verify(LLM(checkpoint, backend=backend), quick=args.quick):
                print(mode, check, flush=True)
            print(mode, f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
