"""The persistent kernel's weight streams, walked as the kernel walks them."""

import pytest
from interpreter import torch

from slipstream.backends.cuda.persistent import FRAGMENT, PAIR, invertible, largest_chunk, pack, piece, plan, tile_rows
from slipstream.backends.cuda.weights import load
from slipstream.models.spec import Attention, FeedForward, Layer, ModelSpec, Rope

BLOCKS = 5


def spec(inner=96):
    a = Attention(4, 2, 32, Rope((1.0,) * 16), 0.2)
    return ModelSpec("llama", 64, 112, (Layer(a, FeedForward(inner)),) * 2, 1e-5, 64, False)


def unpacked(fragments):
    """(k / 16, FRAGMENT) -> (16, k): where mma.m16n8k16 takes each value from, columns as the kernel relabels them."""
    out = torch.zeros(16, len(fragments) * 16)
    for f, fragment in enumerate(fragments):
        for lane in range(32):
            g, c = divmod(lane, 4)
            for i, value in enumerate(fragment[lane * 8 : lane * 8 + 8]):
                half, upper, element = i // 4, i // 2 % 2, i % 2
                out[g + 8 * upper, 16 * f + 4 * c + 2 * half + element] = value
    return out


@pytest.mark.parametrize("chunk", [96, 32])
def test_every_block_finds_its_tiles_in_the_order_it_computes_them(chunk):
    s = spec()
    w, p = load(s, None, torch.device("cpu")), plan(s, BLOCKS)
    stream, begin = pack(s, w, p, chunk, torch.device("cpu"))
    seen = {name: 0 for name in ("qkv", "stream", "gate_up", "head")}
    for b in range(BLOCKS):
        at = int(begin[b]) // (2 * FRAGMENT)

        def take(matrix, kind, tiles, k, step, group=PAIR):
            nonlocal at
            found = {t: [] for t in tiles}
            for first in range(0, len(tiles), group):
                for _ in range(k // step):
                    for t in tiles[first : first + group]:
                        found[t].append(stream[at : at + step // 16])
                        at += step // 16
            for t in tiles:
                rows = tile_rows(kind, s)[t]
                assert torch.equal(unpacked(torch.cat(found[t]).float()), matrix[rows].float())
                seen[kind] += 1

        for i, layer in enumerate(w.layers):
            take(layer.qkv, "qkv", p.tiles[2 * i][b], s.hidden, piece(s.hidden))
            take(layer.o, "stream", p.owned[b], 128, piece(128))
            take(layer.gate_up, "gate_up", p.tiles[2 * i + 1][b], s.hidden, piece(s.hidden))
            take(layer.down, "stream", p.owned[b], 96, chunk, group=len(p.owned[0]))
        take(w.head, "head", p.tiles[-1][b], s.hidden, piece(s.hidden))
    assert seen == {"qkv": 2 * 16, "stream": 2 * 2 * 7, "gate_up": 2 * 12, "head": 4}


def test_tiles_cover_every_output_feature_once():
    s = spec()
    for kind, n in (("qkv", 256), ("stream", 112), ("gate_up", 192), ("head", 64)):
        assert sorted(tile_rows(kind, s).flatten().tolist()) == list(range(n))


def test_blocks_carry_about_the_same_weight():
    s = spec()
    sizes = [sum(len(stage[b]) for stage in plan(s, BLOCKS).tiles) for b in range(BLOCKS)]
    assert max(sizes) - min(sizes) <= 6


def test_the_down_projections_chunk_divides_its_input():
    assert [largest_chunk(n) for n in (96, 1536, 8192, 14336, 11008)] == [96, 1536, 2048, 2048, 256]


def test_a_norms_tiny_weights_move_into_the_matrix_behind_it():
    norm, w = torch.tensor([2.0, -0.5, 0.0, -1e-5]), torch.randn(3, 4)
    (kept, inverse), moved = invertible(norm, w)
    assert torch.allclose(kept * moved, norm * w)
    assert torch.allclose(kept * inverse, torch.ones(4))
    assert kept[:2].tolist() == norm[:2].tolist()
    assert kept.abs().min() > 1e-3
