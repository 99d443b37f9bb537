"""What trains on a GPU: the fused loss and its slope are autograd's, texts that grow together are the reference's."""

from interpreter import DEVICE, torch

from slipstream.backends.cuda.weights import load
from slipstream.kernels.distillation import distil
from slipstream.kernels.text_attention import text_attention
from slipstream.models.checkpoint import load_checkpoint
from slipstream.models.reference import Reference
from slipstream.train.loss import TEMPERATURE, Distillation, distillation
from slipstream.train.respond import Texts, Wish

from tiny import write_tiny_checkpoint  # isort: skip


def test_the_fused_loss_and_its_slope_are_those_of_autograd():
    rows, vocab, hidden = 5, 5000, 32  # more than one block of the kernel, not a multiple of it
    guessed = torch.randn(rows, hidden, device=DEVICE, requires_grad=True)
    target, head = torch.randn(rows, hidden, device=DEVICE), torch.randn(vocab, hidden, device=DEVICE)
    weight = torch.rand(rows, device=DEVICE)
    expected = distillation(guessed.double(), target.double(), head.double(), weight)
    (slope,) = torch.autograd.grad(expected, guessed)
    mine = Distillation.apply(guessed, target, head, weight, 3)
    (my_slope,) = torch.autograd.grad(2 * mine, guessed)
    torch.testing.assert_close(mine.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(my_slope, 2 * slope, rtol=1e-3, atol=1e-5)


def test_a_row_without_weight_brings_neither_loss_nor_slope():
    logits = torch.randn(2, 300, device=DEVICE)
    loss = distil(logits, torch.randn_like(logits), torch.tensor([0.0, 1.0], device=DEVICE), TEMPERATURE)
    assert loss[0] == 0 < loss[1]
    assert not logits[0].any()
    assert logits[1].any()


def test_a_texts_attention_is_over_its_own_positions_alone():
    texts, heads, kv_heads, capacity, d = 3, 6, 2, 150, 32
    qkv = torch.randn(texts, (heads + 2 * kv_heads) * d, device=DEVICE)
    keys, values = torch.randn(2, texts, kv_heads, capacity, d, device=DEVICE)
    at = torch.tensor([0, 70, 149], dtype=torch.int32, device=DEVICE)
    angles = torch.arange(capacity)[:, None] * torch.rand(d // 2)
    table = torch.stack([angles.cos(), angles.sin()], 1).to(DEVICE)
    mine = text_attention(qkv, table, at, keys, values, 0.3).view(texts, heads, d)
    q, k, v = qkv.view(texts, -1, d).double().split([heads, kv_heads, kv_heads], 1)
    for t, n in enumerate(at.tolist()):
        cos, sin = table[n].double()
        q_t, k_t = (torch.cat([x[t, :, : d // 2] * cos - x[t, :, d // 2 :] * sin,
                               x[t, :, d // 2 :] * cos + x[t, :, : d // 2] * sin], -1) for x in (q, k))  # fmt: skip
        torch.testing.assert_close(keys[t, :, n].double(), k_t, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values[t, :, n].double(), v[t])
        for h in range(heads):
            scores = (keys[t, h // 3, : n + 1].double() @ q_t[h] * 0.3).softmax(0)
            expected = scores @ values[t, h // 3, : n + 1].double()
            torch.testing.assert_close(mine[t, h].double(), expected, rtol=1e-3, atol=1e-4)


def test_greedy_texts_that_grow_together_are_those_of_each_alone(tmp_path):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, layers=2, head_dim=32))
    weights = load(checkpoint.spec, checkpoint.tensors, torch.device(DEVICE), torch.float32)
    texts = Texts(checkpoint.spec, weights, slots=2, capacity=20, eos=(), looks=4)
    prompts = [[5, 9, 11], [7], [100, 3, 3, 8, 1], list(range(40))]
    wishes = iter([Wish(i, p, len(p) + 6 + i, 0.0) for i, p in enumerate(prompts)])
    found = dict(texts.write(wishes))
    reference = Reference(checkpoint.spec, checkpoint.tensors)
    for i, prompt in enumerate(prompts[:3]):
        expected = list(prompt)
        for _ in range(6 + i):
            expected.append(int(reference.logits(expected)[-1].argmax()))
        assert found[i].tolist() == expected
    assert found[3].tolist()[:19] == prompts[3][:19]  # one too long for the capacity is cut


def test_sampled_texts_have_the_models_distribution(tmp_path):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, layers=1, head_dim=32))
    weights = load(checkpoint.spec, checkpoint.tensors, torch.device(DEVICE), torch.float32)
    torch.manual_seed(0)
    texts = Texts(checkpoint.spec, weights, slots=200, capacity=4, eos=(), looks=2)
    drawn = [t[-1] for _, t in texts.write(iter([Wish(i, [5, 9], 3, 0.2) for i in range(200)]))]
    p = (Reference(checkpoint.spec, checkpoint.tensors).logits([5, 9])[-1] / 0.2).softmax(0).double()
    counts = torch.bincount(torch.tensor(drawn), minlength=len(p)) / 200
    assert 0.5 * (counts - p).abs().sum() < 0.5 * torch.sqrt(p * (1 - p) / 200).sum() * 1.6


def test_a_text_ends_with_the_token_that_ends_texts(tmp_path):
    checkpoint = load_checkpoint(write_tiny_checkpoint(tmp_path, layers=1, head_dim=32))
    weights = load(checkpoint.spec, checkpoint.tensors, torch.device(DEVICE), torch.float32)
    free = dict(Texts(checkpoint.spec, weights, 1, 16, (), 4).write(iter([Wish(0, [5, 9], 16, 0.0)])))[0].tolist()
    ended = dict(Texts(checkpoint.spec, weights, 1, 16, {free[6]}, 4).write(iter([Wish(0, [5, 9], 16, 0.0)])))[
        0
    ].tolist()
    assert ended == free[: free.index(free[6], 2) + 1]
