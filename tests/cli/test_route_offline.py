"""`slipstream route train`, `eval`, `explain` and `top`, on made-up outcomes and tasks."""

import json

import numpy as np
import pytest

SETTINGS = """
ledger.path = "none.db"
[targets.big]
url = "http://127.0.0.1:9/v1"
tiers.default = {{input = 3.0, cached_input = 0.3, output = 15.0, decode_speed = 60}}
[targets.small]
url = "http://127.0.0.1:9/v1"
tiers.default = {{input = 0.25, output = 1.25, decode_speed = 180}}
[routes.ask]
policy = "learned"
options = {{strong = "big", fast = "small", model = "{model}"}}
strong = "big"
fast = "small"
[routes.agent]
policy = "stage"
options = {{strong = "big", fast = "small"}}
strong = "big"
fast = "small"
[routes.judged]
policy = "judge"
options = {{strong = "big", fast = "small", judge = "small"}}
strong = "big"
fast = "small"
[routes.plain]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Outcomes where long questions defeat the fast arm, and the settings of a router."""
    path = tmp_path_factory.mktemp("route")
    rng = np.random.default_rng(0)
    with (path / "outcomes.jsonl").open("w") as file:
        for i in range(400):
            long = bool(rng.random() < 0.3)
            fast = bool(rng.random() < (0.2 if long else 0.9))
            row = {"text": f"item {i} " * (20 if long else 2), "strong": bool(rng.random() < 0.9), "fast": fast}
            file.write(json.dumps(row) + "\n")
    (path / "route.toml").write_text(SETTINGS.format(model=path / "m.json"))
    return path


def train(cli, folder):
    return cli("route", "train", str(folder / "outcomes.jsonl"), "--share", "0.3", "--out", str(folder / "m.json"))


def test_a_trained_model_is_evaluated_beside_the_plain_arms(cli, folder):
    trained = train(cli, folder)
    assert trained.code == 0, trained.err
    assert "cross-validated" in trained.out
    settings, outcomes = str(folder / "route.toml"), str(folder / "outcomes.jsonl")
    done = cli("route", "eval", settings, "--questions", outcomes, "--json", "--plot", str(folder / "f.svg"))
    assert done.code == 0, done.err
    arms = {arm["arm"].split()[0]: arm for arm in json.loads(done.out)["arms"]}
    assert set(arms) == {"all-strong", "all-fast", "random", "learned"}
    assert arms["learned"]["right"] > arms["random"]["right"]
    assert arms["learned"]["usd"] < arms["all-strong"]["usd"]
    assert (folder / "f.svg").read_text().startswith("<?xml")


def test_made_up_tasks_are_said_to_be_assumed(cli, folder):
    train(cli, folder)
    done = cli("route", "eval", str(folder / "route.toml"), "--route", "agent", "--tasks", "5")
    assert done.code == 0, done.err
    assert "stage" in done.out
    assert "right: assumed; time and cost: modelled" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "3", "--route", "none"], "there is no route 'none'"),
        (["--tasks", "3", "--route", "plain"], "names no arms"),
        (["--tasks", "3", "--route", "judged"], "asks a model"),
        (["--tasks", "3", "--route", "agent", "--fast-right", "2", "0"], "between 0 and 1"),
        (["--route", "agent"], "give one of"),
        (["--recorded", "none.jsonl", "--route", "agent"], "cannot read the recording"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(cli, folder, words, said):
    done = cli("route", "eval", str(folder / "route.toml"), *words)
    assert done.code == 2
    assert said in done.err


def test_a_ledger_that_is_not_there_is_named(cli, tmp_path):
    for words in (["top", str(tmp_path / "x.db"), "--once"], ["explain", "req_1", "--ledger", str(tmp_path / "x.db")]):
        done = cli("route", *words)
        assert done.code == 2
        assert "there is no ledger" in done.err
