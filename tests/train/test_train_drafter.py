"""Training: blocks are those of the definition, a run learns and goes on where it stopped, what it writes drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from tiny import write_tiny_checkpoint
from tiny_drafter import Oracle, write_tiny_drafter

torch = pytest.importorskip("torch")

from slipstream.backends.cuda.weights import load  # noqa: E402
from slipstream.bench.verify import verify  # noqa: E402
from slipstream.cli import app  # noqa: E402
from slipstream.errors import BackendError, RequestError  # noqa: E402
from slipstream.models.block_drafter import load_block_drafter  # noqa: E402
from slipstream.models.checkpoint import load_checkpoint  # noqa: E402
from slipstream.models.reference import Reference  # noqa: E402
from slipstream.train import loop, target  # noqa: E402
from slipstream.train.data import Text, draft_vocabulary, read_prompts  # noqa: E402
from slipstream.train.drafter import Drafter  # noqa: E402
from slipstream.train.export import write_config, write_weights  # noqa: E402
from slipstream.train.judge import by_place, right  # noqa: E402
from slipstream.train.loop import Recipe, train_drafter  # noqa: E402
from slipstream.train.ranks import Ranks  # noqa: E402

RECIPE = Recipe(steps=30, batch=40, lr=3e-3, warmup=2, calibrated=64, save_every=10, layers=1, draft_vocab=64,
                markov_rank=32, candidates=4, window=16)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=4, head_dim=32)


@pytest.fixture(scope="module")
def checkpoint(path):
    return load_checkpoint(path)


def weights_of(checkpoint):
    return load(checkpoint.spec, checkpoint.tensors, torch.device("cpu"), torch.float32)


def learner(drafter):
    """The module with the very weights of a drafter's file."""
    module = Drafter(drafter.config)
    with torch.no_grad():
        for name, tensor in drafter.tensors.items():
            module.tensor(name).copy_(torch.from_numpy(tensor.float32()))
    return module


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"target_layer_ids": [1]}], ids=str)
def test_blocks_heads_and_confidence_are_those_of_the_definition(checkpoint, tmp_path, changes):
    drafter = load_block_drafter(write_tiny_drafter(tmp_path, **changes), checkpoint.spec, checkpoint.tensors)
    oracle, module, weights = (
        Oracle(drafter, Reference(checkpoint.spec, checkpoint.tensors)),
        learner(drafter),
        weights_of(checkpoint),
    )
    text = np.random.default_rng().integers(0, 288, 40)
    at = torch.tensor([[1, 12, 33]])
    taps, _ = target.run(checkpoint.spec, weights, torch.from_numpy(text)[None], drafter.config.taps)
    with torch.no_grad():
        y = module.blocks(module.context(taps), at, weights.embed[torch.from_numpy(text)[at]])[0]
        for i, p in enumerate(at[0].tolist()):
            tokens, confidence, scores, ids = oracle.draft(text[: p + 1])
            before = torch.from_numpy(np.array([text[p], *tokens[:-1]]))
            bent, state = module.markov(y[i], weights.embed[before])
            mine = torch.einsum("rch,rh->rc", weights.head[torch.from_numpy(ids)], bent)
            np.testing.assert_allclose(mine, scores, atol=1e-3)
            chosen = mine.log_softmax(-1).max(-1).values
            np.testing.assert_allclose(module.confidence(y[i], state, chosen).sigmoid(), confidence, atol=1e-3)


def test_padding_and_neighbours_change_nothing_of_the_target(checkpoint):
    weights, text = weights_of(checkpoint), torch.randint(0, 288, (2, 30))
    alone = target.run(checkpoint.spec, weights, text[:1, :20], [0, 3])
    both = target.run(checkpoint.spec, weights, text, [0, 3])
    for a, b in zip(alone, both, strict=True):
        torch.testing.assert_close(a[0], b[0, :20], atol=1e-4, rtol=1e-4)


def test_the_targets_words_are_those_of_the_reference(checkpoint):
    text = torch.randint(0, 288, (1, 25))
    weights = weights_of(checkpoint)
    _, final = target.run(checkpoint.spec, weights, text, [0])
    expected = Reference(checkpoint.spec, checkpoint.tensors).logits(text[0].tolist())
    torch.testing.assert_close(final[0] @ weights.head.T, expected, atol=1e-3, rtol=1e-3)


def run_of(checkpoint, file, recipe=RECIPE):
    """A run over texts that repeat, which are easy to learn."""
    rng = np.random.default_rng(3)
    texts = [Text(np.tile(rng.integers(0, 60, 6), 6).astype(np.int32), 4) for _ in range(8)]
    config = loop.plan_config(checkpoint, recipe)
    module = Drafter(config, torch.Generator().manual_seed(0))
    tokens = draft_vocabulary(texts, config.draft_vocab, config.vocab)
    return loop.Run(checkpoint, weights_of(checkpoint), module, texts, tokens, recipe, file)


def test_a_run_learns(checkpoint, tmp_path):
    losses = run_of(checkpoint, tmp_path / "a.pt").steps(lambda *args: None)
    assert np.mean(losses[-5:]) < 0.97 * np.mean(losses[:5])


def test_a_run_that_was_cut_off_ends_as_one_that_was_not(checkpoint, tmp_path):
    whole = run_of(checkpoint, tmp_path / "a.pt")
    whole.steps(lambda *args: None)

    def cut(stage, done, total):
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_of(checkpoint, tmp_path / "b.pt").steps(cut)
    again = run_of(checkpoint, tmp_path / "b.pt")
    assert len(again.steps(lambda *args: None)) == 10  # from the state at step 20
    for a, b in zip(whole.drafter.parameters(), again.drafter.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_confidence_head_alone_learns_from_calibration(checkpoint, tmp_path):
    run = run_of(checkpoint, tmp_path / "a.pt")
    n, hidden = 32, checkpoint.spec.hidden
    rows = torch.randn(3, n, hidden, requires_grad=True)
    loss, right = loop.calibration(
        run.drafter,
        rows[0],
        rows[1],
        rows[2].detach(),
        run.vocab,
        run.weights.head,
        torch.arange(n) % 2 == 0,
        torch.ones(n),
    )
    loss.backward()
    moved = {name for name, p in run.drafter.named_parameters() if p.grad is not None}
    assert moved == {"confidence_y", "confidence_m", "confidence_p", "confidence_b"}
    assert rows.grad is None
    assert 0 <= right <= 1


def test_a_written_drafter_loads_with_its_weights(checkpoint, tmp_path):
    run = run_of(checkpoint, tmp_path / "a.pt")
    write_weights(tmp_path, run.drafter, run.vocab.numpy().astype(np.int32))
    write_config(tmp_path, run.drafter.config, {"chat": 2.5})
    loaded = load_block_drafter(tmp_path, checkpoint.spec, checkpoint.tensors)
    assert loaded.config == replace(run.drafter.config, acceptance={"chat": 2.5})
    for name, tensor in loaded.tensors.items():
        mine = run.drafter.tensor(name).detach().numpy()
        assert np.abs(tensor.float32() - mine).max() <= 0.01 * np.abs(mine).max() + 1e-6


def test_the_command_trains_resumes_and_changes_no_token(path, checkpoint, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(4)))
    files = ["--data", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    sizes = "--steps 3 --batch 64 --max-tokens 24 --layers 1 --draft-vocab 64 --json"
    args = ["train-drafter", str(path), *files, *sizes.split()]
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert json.loads(done.stdout)["steps"] == 3
    assert "Block drafter" in (tmp_path / "out" / "README.md").read_text()
    answers = (tmp_path / "out" / "responses.jsonl").read_text()
    (tmp_path / "out" / "responses.jsonl").write_text(answers[:-20])  # cut off within the last line
    assert json.loads(CliRunner().invoke(app, args, catch_exceptions=False).stdout)["steps"] == 0
    assert (tmp_path / "out" / "responses.jsonl").read_text() == answers
    load_block_drafter(tmp_path / "out", checkpoint.spec, checkpoint.tensors)
    assert all(check.passed for check in verify(path, drafter=str(tmp_path / "out"), quick=True))


def test_a_run_on_prompts_of_its_own_is_judged_by_answers_it_did_not_learn_from(path, tmp_path):
    lines = (json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(loop.HELD_OUT))
    (tmp_path / "p.jsonl").write_text("".join(lines))
    shown = []
    trained = train_drafter(
        str(path), tmp_path / "p.jsonl", tmp_path / "out", replace(RECIPE, steps=2), own=3, max_tokens=12,
        progress=lambda stage, done, total: shown.append(stage),
    )  # fmt: skip
    assert {"prompts of its own", "answers"} <= set(shown)
    assert len(trained.held) == 7
    assert all(0 <= share <= 1 for share in trained.held)
    told = json.loads((tmp_path / "out" / "config.json").read_text())["acceptance"]
    assert told == {"held out": 1 + sum(trained.held)}


def test_two_processes_train_the_drafter_of_one_that_sees_both_batches(path, checkpoint, tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(6)))
    sizes = [
        "--steps",
        "2",
        "--batch",
        "8",
        "--max-tokens",
        "12",
        "--layers",
        "1",
        "--draft-vocab",
        "64",
        "--device",
        "cpu",
    ]
    files = ["--data", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    subprocess.run([*torchrun, "slipstream", "train-drafter", str(path), *files, *sizes], check=True, timeout=240)
    assert len(list((tmp_path / "out").glob("responses*.jsonl"))) == 2
    state = torch.load(tmp_path / "out" / "training.pt", weights_only=True)["drafter"]

    class Both(loop.Run):
        """One process whose batch is the next two."""

        def batches(self):
            return zip(*[iter(super().batches())] * 2, strict=False)

        def loss(self, texts, number):
            return (super().loss(texts[0], 2 * number) + super().loss(texts[1], 2 * number + 1)) / 2

    recipe = replace(Recipe(steps=2, batch=8, layers=1, draft_vocab=64))
    learnt, _ = loop.gather(checkpoint, weights_of(checkpoint), read_prompts(tmp_path / "p.jsonl"), tmp_path / "out",
                            recipe, 0, 12, "auto", Ranks(), loop.silent)  # fmt: skip
    config = loop.plan_config(checkpoint, recipe)
    module = Drafter(config, torch.Generator().manual_seed(0))
    tokens = draft_vocabulary(learnt, config.draft_vocab, config.vocab)
    Both(checkpoint, weights_of(checkpoint), module, learnt, tokens, recipe, tmp_path / "x.pt").steps(loop.silent)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-5)


def test_guesses_count_while_all_before_them_are_right():
    class Fixed:
        config = type("Config", (), {"candidates": 2})

        def markov(self, y, before):
            return y, None

    head = torch.eye(4)  # of the draft vocabulary: tokens 10, 11, 12, 13
    vocab, embed = torch.arange(10, 14), torch.zeros(20, 4)
    y = head[torch.tensor([[1, 2, 3], [1, 0, 3]])]
    truth = torch.tensor([[11, 12, 10], [11, 12, 13]])
    found = right(Fixed(), y, torch.tensor([5, 6]), truth, embed, vocab, head)
    assert found.tolist() == [[True, True, False], [True, False, False]]
    assert by_place([(found, torch.ones_like(found))]) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 5}', '{"messages": "hi"}', ""])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(RequestError, match=r"p\.jsonl"):
        read_prompts(tmp_path / "p.jsonl")


def test_sparse_targets_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(BackendError, match="dense"):
        train_drafter(str(write_tiny_checkpoint(tmp_path / "m", "qwen3_moe")), tmp_path / "p.jsonl", tmp_path / "out")


def test_answers_to_other_prompts_are_not_taken_for_these(path, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "y"}\n')
    train_drafter(str(path), tmp_path / "a.jsonl", tmp_path / "out", replace(RECIPE, steps=1), max_tokens=8)
    with pytest.raises(RequestError, match="other prompts"):
        train_drafter(str(path), tmp_path / "b.jsonl", tmp_path / "out", replace(RECIPE, steps=1), max_tokens=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(path, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(BackendError, match="--device cpu"):
        train_drafter(str(path), tmp_path / "a.jsonl", tmp_path / "out", device="cuda")


@pytest.mark.parametrize("wrong", [["--lr", "-1"], ["--device", "nonsense"], ["--out", __file__]], ids=str)
def test_senseless_options_are_refused_before_anything_runs(wrong):
    done = CliRunner().invoke(app, ["train-drafter", "smollm2", "--data", "p.jsonl", "--out", "out", *wrong])
    assert done.exit_code == 2
    assert wrong[0] in done.output


def test_line_breaks_of_unicode_may_stand_within_a_prompt(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl")[0][0]["content"] == "a\u2028b"


def test_the_draft_vocabulary_is_what_answers_use_most():
    texts = [Text(np.array([9, 9, 9, 9, 5, 5, 7], np.int32), 4)]
    assert draft_vocabulary(texts, 2, 20).tolist() == [5, 7]
    assert draft_vocabulary(texts, 4, 20).tolist() == [0, 1, 5, 7]
