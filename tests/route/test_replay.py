"""Offline replay: what a policy's choices take, on recorded sessions and on made-up tasks."""

import json
from dataclasses import replace

import pytest

from slipstream.route.decision import Catalogue, Conversation, Decision, Message, RouteError, SessionState, Target, Tier
from slipstream.route.policies import make_policy
from slipstream.route.replay import Run, compare, read_recording, replay, take_step
from slipstream.route.simulate import Task, World, simulate

STRONG = Target("strong", {"default": Tier("default", 3.0, 0.3, 15.0, 60.0, 4000.0, 0.6)}, 200_000)
FAST = Target("fast", {"default": Tier("default", 0.25, 0.025, 1.25, 180.0, 12_000.0, 0.3)}, 200_000)
CATALOGUE = Catalogue({"strong": STRONG, "fast": FAST})
RIGHT = {"strong": (1.0, 0.9), "fast": (0.97, 0.5)}
PAIR = {"strong": "strong", "fast": "fast"}


def always(name):
    return make_policy("fixed", {"use": name})


def written(tmp_path, rows):
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SESSION = {
    "messages": [
        {"role": "user", "content": "mend it"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "run", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "exit code: 1"},
    ],
    "steps": [
        {"messages": 1, "prompt_tokens": 1000, "output_tokens": 100, "tool_s": 2.0},
        {"messages": 3, "prompt_tokens": 1200, "output_tokens": 50},
    ],
}


def test_a_recorded_session_costs_what_its_steps_cost(tmp_path):
    (steps,) = read_recording(written(tmp_path, [SESSION]))
    run = replay(always("strong"), steps, CATALOGUE, "s")
    assert run.usd == pytest.approx((1000 * 3 + 100 * 15 + 1100 * 0.3 + 100 * 3 + 50 * 15) / 1e6)
    assert run.time_s == pytest.approx(2 * 0.6 + 1000 / 4000 + 100 / 4000 + 150 / 60 + 2.0)
    assert (run.right, run.steps, run.switches) == (None, 2, 0)


def test_recorded_errors_reach_the_policy(tmp_path):
    (steps,) = read_recording(written(tmp_path, [SESSION]))
    run = replay(make_policy("cascade", PAIR | {"errors_in_row": 1}), steps, CATALOGUE, "s")
    assert (run.share("strong"), run.switches, run.reread_tokens) == (0.5, 1, 1100)


def test_deciding_is_on_the_bill():
    class Slow:
        name = "slow"

        def decide(self, conversation, state, catalogue):
            decision = always("fast").decide(conversation, state, catalogue)
            return replace(decision, judge_cost=0.5, judge_time_s=3.0)

    step = Conversation((Message("user", "x"),), prompt_tokens=10)
    free, slow = Run(), Run()
    for policy, run in ((always("fast"), free), (Slow(), slow)):
        decision, state = take_step(policy, step, SessionState("s"), CATALOGUE, run, output_tokens=5, tool_s=0)
        assert isinstance(decision, Decision)
        assert state.spent == run.usd
    assert (slow.usd - free.usd, slow.time_s - free.time_s) == (pytest.approx(0.5), pytest.approx(3.0))


def test_a_world_without_failure_takes_each_step_once():
    world = World({"strong": (1, 1), "fast": (1, 1)}, reads=(2, 2), edits=(3, 3))
    run = Task(world, 1, always("fast"), CATALOGUE).play()
    assert (run.right, run.steps) == (True, 1 + 2 + 3 * 2 + 1)


def test_a_world_that_never_succeeds_ends():
    run = Task(World({"strong": (0, 0), "fast": (0, 0)}), 1, always("fast"), CATALOGUE).play()
    assert run.right is False
    assert run.steps <= World(RIGHT).most_steps + 1


def test_arms_meet_the_same_task():
    world = World({"strong": (0.9, 0.6), "fast": (0.9, 0.6)})
    arms = simulate({"a": lambda: always("strong"), "b": lambda: always("fast")}, world, CATALOGUE, range(10))
    assert [run.steps for run in arms["a"]] == [run.steps for run in arms["b"]]
    assert [run.right for run in arms["a"]] == [run.right for run in arms["b"]]


def test_routing_by_stage_beats_its_random_share_at_quality():
    arms = {
        "all-strong": lambda: always("strong"),
        "all-fast": lambda: always("fast"),
        "stage": lambda: make_policy("stage", PAIR),
    }
    strong, fast, stage = compare(simulate(arms, World(RIGHT), CATALOGUE, range(60)), "strong", draws=50)
    assert fast.right < stage.right <= strong.right
    assert fast.usd < stage.usd < strong.usd
    assert stage.time_saved.low <= stage.time_saved.value <= stage.time_saved.high
    assert strong.time_saved.value == strong.usd_saved.value == 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": []}, "lacks 'steps'"),
        (SESSION | {"steps": [{"messages": 9, "prompt_tokens": 1, "output_tokens": 1}]}, "saw 9 of 3"),
        (SESSION | {"messages": [{"role": "robot"}]}, "no role 'robot'"),
        ([1], "not a recorded session"),
    ],
)
def test_a_wrong_session_is_named_by_its_line(tmp_path, row, said):
    with pytest.raises(RouteError, match=rf"sessions.jsonl:2: .*{said}"):
        read_recording(written(tmp_path, [SESSION, row]))
