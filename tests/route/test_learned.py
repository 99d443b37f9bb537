"""The classifier: what it sees, what it learns, what its file holds. Outcomes here are made up."""

import json
import time

import numpy as np
import pytest

from slipstream.route.decision import Conversation, Message, RouteError, SessionState
from slipstream.route.evaluate import judge, resamples, share_for
from slipstream.route.learned import FEATURES, features, load, save
from slipstream.route.outcomes import Outcome, read_outcomes, table
from slipstream.route.policies import make_policy
from slipstream.route.training import folds, gain_curve, train
from slipstream.route.trajectory import Signals


def invented(n=600, seed=0, groups=10):
    """Long questions defeat the fast arm, numbers both; the rest is chance."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        long, sums = rng.random() < 0.4, rng.random() < 0.3
        text = f"Case {i}: " + "the court held that " * (12 if long else 1) + ("2 + 3 = 5; " * 5 if sums else "")
        chances = (0.2, 0.2) if sums else (0.95, 0.3) if long else (0.95, 0.9)
        strong, fast = (bool(rng.random() < chance) for chance in chances)
        made.append(Outcome(text, strong, fast, f"group {i % groups}"))
    return made


@pytest.fixture(scope="module")
def data():
    return table(invented())


@pytest.fixture(scope="module")
def model(data):
    return train(data, recover=0.9)  # in the gap between the kinds of question, and not amid equal ones


def seen(text, name):
    return features(text)[FEATURES.index(name)]


def test_the_form_of_a_question_is_seen():
    text = "Which of these is NOT a prime?\nA. 2\nB. 3\nC. 4, or 6\nD. 5\nAnswer:"
    assert seen(text, "options") == 4
    assert seen(text, "numeric_options") == 4
    assert seen(text, "NEGATED") == seen(text, "which") == seen(text, "question") == 1
    assert seen("Sing.", "options") == seen("Sing.", "NEGATED") == 0


@pytest.mark.parametrize("text", ["", "\n", "A. ", "A. \nB. \nAnswer:", "1" * 100_000, "\u2192" * 10, "A.  x " * 5000])
def test_any_text_has_finite_features(text):
    assert np.isfinite(features(text)).all()
    assert features(text).shape == (len(FEATURES),)


def test_looking_at_a_request_is_quick_whatever_it_holds():
    for text in ("A. x\n" * 50_000, "word " * 50_000, "(" * 50_000, "A. " + "x" * 50_000):
        began = time.perf_counter()
        features(text)
        assert time.perf_counter() - began < 0.2


def test_signals_are_features_too():
    row = features("x", Signals(errors_in_row=3, tests_passed=False))
    assert row[FEATURES.index("errors_in_row")] == 3
    assert row[FEATURES.index("tests_passed")] == -1


def test_what_was_learned_beats_chance_on_new_questions(model):
    new = table(invented(seed=1))
    scores = model.gain(new.x)
    found = judge(new, scores, scores >= model.threshold, by_group=False, draws=50)
    assert found.share_for_half.value < 0.4
    assert found.recovered.value > found.share.value + 0.1
    assert found.recovered.low < found.recovered.value < found.recovered.high


def test_a_model_survives_its_file_bit_for_bit(model, data, tmp_path):
    save(model, tmp_path / "m.json")
    again = load(tmp_path / "m.json")
    assert np.array_equal(again.gain(data.x), model.gain(data.x))
    assert again.threshold == model.threshold
    json.loads((tmp_path / "m.json").read_text())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(format="other"),
        lambda d: d["features"].append("more"),
        lambda d: d["strong"]["left"][0].__setitem__(0, 999),
        lambda d: d["fast"]["feature"][0].__setitem__(0, 999),
        lambda d: d["fast"].pop("value"),
        lambda d: d["fast"]["value"].pop(),
        lambda d: d.pop("threshold"),
    ],
)
def test_a_spoilt_file_is_refused_in_one_line(model, tmp_path, spoil):
    path = tmp_path / "m.json"
    save(model, path)
    read = json.loads(path.read_text())
    spoil(read)
    path.write_text(json.dumps(read))
    with pytest.raises(RouteError, match="no routing model") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_the_policy_says_its_gain_and_takes_a_share(model, tmp_path):
    from test_policies import BIG, CATALOGUE, PAIR, SMALL

    path = tmp_path / "m.json"
    save(model, path)
    hard, easy = (Conversation((Message("user", one.text),)) for one in _hard_and_easy())
    policy = make_policy("learned", PAIR | {"model": str(path)})
    decisions = [policy.decide(one, SessionState("s"), CATALOGUE) for one in (hard, easy)]
    assert [one.choice for one in decisions] == [BIG, SMALL]
    assert decisions[0].score > decisions[1].score
    assert "expected gain" in decisions[0].reasons[0]
    assert decisions[0].judge_time_s > 0
    never = make_policy("learned", PAIR | {"model": str(path), "share": 0})
    assert never.decide(hard, SessionState("s"), CATALOGUE).choice == SMALL
    with pytest.raises(RouteError, match="threshold or share"):
        make_policy("learned", PAIR | {"model": str(path), "share": 0, "threshold": 0})


def _hard_and_easy():
    return Outcome("the court held that " * 12, True, False), Outcome("the court held that ", True, True)


def test_folds_cover_everything_once_and_keep_groups_and_equal_texts_together(data):
    for by_group in (False, True):
        masks = folds(data, by_group=by_group)
        assert (np.sum(masks, 0) == 1).all()
    for mask in masks:
        assert not set(data.groups[mask]) & set(data.groups[~mask])
    twice = table(invented(50) * 2)
    assert all((mask[:50] == mask[50:]).all() for mask in folds(twice, by_group=False))


def test_the_gain_curve_takes_equal_scores_together():
    curve = gain_curve(np.array([0.9, 0.5, 0.5, 0.1]), np.array([1.0, 1.0, 0.0, 0.0]))
    assert curve == [(1.0, 0.0, 0.0), (0.9, 0.25, 0.5), (0.5, 0.75, 1.0), (0.1, 1.0, 1.0)]
    assert share_for(0.5, np.array([0.9, 0.5, 0.5, 0.1]), np.array([1.0, 1.0, 0.0, 0.0])) == 0.25


def test_scores_that_know_nothing_recover_their_share():
    new = table(invented(2000, seed=3))
    scores = np.random.default_rng(0).random(len(new))
    assert abs(judge(new, scores, scores > 0.5, by_group=False, draws=20).share_for_half.value - 0.5) < 0.08


def test_a_bootstrap_over_groups_draws_whole_groups():
    groups = np.array(["a", "a", "b"])
    for at in resamples(groups, 3, 20, 0):
        assert np.sum(at == 0) == np.sum(at == 1)


def test_too_little_or_nothing_to_gain_is_refused():
    with pytest.raises(RouteError, match="too few"):
        train(table(invented(50)))
    with pytest.raises(RouteError, match="nothing to route for"):
        train(table([Outcome(f"q {i}", i % 2 == 0, True) for i in range(200)]))


def test_outcomes_are_read_from_both_formats(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "q", "strong": true, "fast": false, "group": "g"}\n\n')
    assert read_outcomes(tmp_path / "a.jsonl") == [Outcome("q", True, False, "g")]
    (tmp_path / "law.csv").write_text('prompt,big,small\n"a\nb",True,False\n')
    assert read_outcomes(tmp_path, "big", "small") == [Outcome("a\nb", True, False, "law")]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "q", "strong": true}', "a.jsonl:1: an outcome lacks 'fast'"),
        ("a.jsonl", '{"text": "q", "strong": 1, "fast": 0}', "a.jsonl:1: not an outcome"),
        ("a.csv", "prompt,big\nq,True\n", "has the columns prompt, big"),
        ("a.csv", "prompt,big,small\nq,True,maybe\n", "a.csv:2: right or wrong"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(RouteError, match=said):
        read_outcomes(tmp_path / name, "big", "small")
