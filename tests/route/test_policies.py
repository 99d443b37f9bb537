"""Policies: pure functions from a conversation, a session's state and the targets to a decision."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.route.decision import (
    Catalogue,
    Choice,
    Conversation,
    Message,
    Reply,
    RouteError,
    SessionState,
    Target,
    Tier,
    ToolCall,
)
from slipstream.route.estimate import estimate, feasible
from slipstream.route.policies import POLICIES, make_policy

SLOW = Tier("default", 3.0, 0.3, 15.0, 60.0, 4000.0, 0.5)
PRIORITY = Tier("fast", 6.0, 0.6, 30.0, 150.0, 8000.0, 0.3)
CHEAP = Tier("default", 0.25, 0.025, 1.25, 180.0, 12000.0, 0.2)
CATALOGUE = Catalogue(
    {
        "big": Target("big", {"default": SLOW, "fast": PRIORITY}, 200_000, images=True),
        "small": Target("small", {"default": CHEAP}, 32_000),
    }
)
PAIR = {"strong": "big", "fast": "small"}
BIG, SMALL = Choice("big", "default"), Choice("small", "default")
STATE = SessionState("s")


def talk(*messages, **more):
    return Conversation(tuple(messages), **({"prompt_tokens": 1000} | more))


def step(result, *, name="run", arguments="{}", is_error=None, key="c"):
    return (
        Message("assistant", "", (ToolCall(key, name, arguments),)),
        Message("tool", result, tool_call_id=key, is_error=is_error),
    )


USER = Message("user", "mend the parser")


def test_fixed_takes_what_it_is_told_and_lists_the_alternatives():
    decision = make_policy("fixed", {"use": "big/fast"}).decide(talk(USER), STATE, CATALOGUE)
    assert decision.choice == Choice("big", "fast")
    assert {one.choice for one in decision.alternatives} == {BIG, Choice("big", "fast"), SMALL}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed", {"use": "small"}),
        ("weighted", {"weights": {"small": 1}}),
        ("rules", {"default": "small"}),
        ("stage", {"strong": "small", "fast": "small"}),
        ("cascade", {"strong": "small", "fast": "small"}),
        ("judge", {"strong": "small", "fast": "small", "judge": "small"}),
        ("deadline", {"deadline_s": 60}),
        ("budget", {"budget_usd": 1}),
    ],
)
@pytest.mark.parametrize(
    "large", [talk(USER, prompt_tokens=100_000), talk(replace(USER, images=1))], ids=["context", "images"]
)
def test_no_policy_sends_a_request_where_it_does_not_fit(name, options, large):
    assert make_policy(name, options).decide(large, STATE, CATALOGUE).choice.target == "big"


TEXTS = st.sampled_from(["", "mend it", "exit code: 1", "<summary>", "3 failed in 1s", "{}", '{"exit_code": 2}'])
MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "user", "assistant", "tool"]),
        TEXTS,
        st.lists(st.builds(ToolCall, st.sampled_from("abc"), st.sampled_from(["run", "read", "edit"]), TEXTS)).map(
            tuple
        ),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from([None, True, False]),
        st.integers(0, 1),
    ),
    max_size=8,
)
CHOICES = st.sampled_from([None, BIG, SMALL, Choice("big", "fast"), Choice("gone", "default")])


@given(
    st.sampled_from(
        [("stage", PAIR), ("cascade", PAIR), ("judge", PAIR | {"judge": "gone"}), ("budget", {"budget_usd": 1})]
    ),
    st.sampled_from(["turn", "step"]),
    MESSAGES,
    st.integers(0, 150_000),
    st.builds(
        SessionState,
        st.just("s"),
        CHOICES,
        st.dictionaries(st.sampled_from(["big", "small", "gone"]), st.integers(0, 10**6)),
        CHOICES,
        CHOICES,
    ),
)
def test_any_conversation_gets_a_choice_that_can_take_it_and_the_same_again(named, each, messages, tokens, state):
    name, options = named
    policy = make_policy(name, options | ({"each": each} if name != "budget" else {}))
    conversation = Conversation(tuple(messages), prompt_tokens=tokens)
    decision = policy.decide(conversation, state, CATALOGUE)
    assert decision.choice in feasible(conversation, CATALOGUE)
    assert decision.reasons
    assert policy.decide(conversation, state, CATALOGUE) == decision


def test_a_request_that_fits_nowhere_is_refused_with_every_reason():
    with pytest.raises(RouteError, match=r"big: .*context of 200000; small: .*context of 32000"):
        make_policy("fixed", {}).decide(talk(USER, prompt_tokens=300_000), STATE, CATALOGUE)


def test_weights_hold_and_sessions_keep_their_draw():
    policy = make_policy("weighted", {"weights": {"big": 1, "small": 3}, "seed": 7})
    draws = [policy.decide(talk(USER), SessionState(f"s{i}"), CATALOGUE).choice for i in range(2000)]
    assert abs(sum(choice == BIG for choice in draws) / 2000 - 0.25) < 0.03
    again = [policy.decide(talk(USER), SessionState(f"s{i}", requests=9), CATALOGUE).choice for i in range(2000)]
    assert again == draws


def test_the_first_rule_that_holds_decides():
    rules = [
        {"use": "big", "errors_in_row": 1},
        {"use": "small", "agent": "sub"},
        {"use": "big/fast", "matches": "(?i)prove"},
    ]
    policy = make_policy("rules", {"default": "small", "rules": rules})
    assert policy.decide(talk(USER), STATE, CATALOGUE).choice == SMALL
    assert policy.decide(talk(Message("user", "Prove it")), STATE, CATALOGUE).choice == Choice("big", "fast")
    failed = talk(USER, *step("no such file", is_error=True), agent="scout")
    assert policy.decide(failed, STATE, CATALOGUE).choice == BIG


def test_stage_plans_and_diagnoses_on_strong_and_carries_out_on_fast():
    policy = make_policy("stage", PAIR | {"affinity_steps": 0})
    seen = [
        policy.decide(conversation, STATE, CATALOGUE).choice
        for conversation in (
            talk(USER),
            talk(USER, *step("written", name="edit", is_error=False)),
            talk(USER, *step("exit code: 1\nTraceback")),
            talk(USER, *step("same", is_error=False) * 3),
            talk(USER, agent="scout"),
        )
    ]
    assert seen == [BIG, SMALL, BIG, BIG, SMALL]


def test_the_step_after_tests_passed_is_strong_where_asked_for():
    passed = talk(USER, *step("3 passed in 0.10s", name="run_tests"))
    next_too = PAIR | {"affinity_steps": 0, "hard": ["plan", "next"]}
    assert make_policy("stage", PAIR).decide(passed, STATE, CATALOGUE).choice == SMALL
    assert make_policy("stage", next_too).decide(passed, STATE, CATALOGUE).choice == BIG


def test_moving_down_must_pay_for_reading_the_prompt_again():
    policy = make_policy("stage", PAIR | {"affinity_steps": 1, "usd_per_hour": 0})
    conversation = talk(USER, *step("done", is_error=False), prompt_tokens=30_000, max_tokens=20)
    warm = SessionState("s", last=BIG, cached={"big": 29_900})
    dear = replace(CHEAP, input_price=2.0)
    near = Catalogue(CATALOGUE.targets | {"small": Target("small", {"default": dear}, 32_000)})
    stays = policy.decide(conversation, warm, near)
    assert stays.choice == BIG
    assert "does not pay" in stays.reasons[-1]
    assert policy.decide(conversation, replace(warm, cached={"big": 29_900, "small": 29_000}), near).choice == SMALL
    longer = make_policy("stage", PAIR | {"affinity_steps": 50, "usd_per_hour": 0})
    assert longer.decide(conversation, warm, near).choice == SMALL


def test_an_estimate_counts_the_prompt_that_is_read_again():
    conversation = talk(USER, prompt_tokens=10_000)
    state = SessionState("s", last=BIG, cached={"big": 9_000})
    here, there = (estimate(choice, conversation, state, CATALOGUE) for choice in (BIG, SMALL))
    assert (here.reread_tokens, there.reread_tokens) == (0, 9_000)
    assert here.cost == pytest.approx((9_000 * 0.3 + 1_000 * 3.0 + 300 * 15.0) / 1e6)
    assert there.time_s == pytest.approx(0.2 + 10_000 / 12_000 + 300 / 180)


def test_cascade_escalates_on_evidence_and_stays():
    policy = make_policy("cascade", PAIR)
    calm = talk(USER, *step("fine", is_error=False))
    assert policy.decide(calm, STATE, CATALOGUE).choice == SMALL
    failing = talk(USER, *step("no", is_error=True), *step("no", is_error=True, key="d"))
    risen = policy.decide(failing, STATE, CATALOGUE)
    assert (risen.choice, risen.latch) == (BIG, True)
    assert policy.decide(calm, replace(STATE, latched=BIG), CATALOGUE).choice == BIG


def test_a_turn_is_classified_once_unless_steps_are_asked_for():
    inside = talk(USER, *step("no", is_error=True))
    state = replace(STATE, turn_choice=SMALL, last=SMALL)
    assert make_policy("stage", PAIR | {"each": "turn"}).decide(inside, state, CATALOGUE).choice == SMALL
    assert make_policy("stage", PAIR | {"each": "step"}).decide(inside, state, CATALOGUE).choice == BIG


def asker(text, asked):
    async def ask(choice, prompt, *, max_tokens, timeout_s):
        asked.append(choice)
        if text is None:
            await asyncio.sleep(0.06)
            raise RouteError("too late")
        return Reply(text, 100, 1, 0.001, 0.2)

    return ask


def judged(policy, said, asked, conversation=None):
    return asyncio.run(policy.decide_asking(conversation or talk(USER), STATE, CATALOGUE, asker(said, asked)))


@pytest.mark.parametrize(("said", "target"), [("8", "big"), ("2", "small"), (" Score: 9.", "big"), ("none", "big")])
def test_a_judge_is_on_the_bill_and_asked_once(said, target):
    policy, asked = make_policy("judge", PAIR | {"judge": "small"}), []
    first = judged(policy, said, asked)
    assert (first.choice.target, first.judge_cost, first.judge_time_s) == (target, 0.001, 0.2)
    if said != "none":
        again = judged(policy, said, asked)
        assert (again.choice.target, again.judge_cost, len(asked)) == (target, 0.0, 1)


def test_a_judge_that_gives_no_answer_costs_its_time_and_decides_nothing():
    policy = make_policy("judge", PAIR | {"judge": "small", "timeout_s": 99, "otherwise": "fast"})
    decision = judged(policy, None, [])
    assert (decision.choice, decision.judge_cost) == (SMALL, 0.0)
    assert 0.05 <= decision.judge_time_s < 99  # what it took, whatever it might have taken


def test_a_judge_is_not_asked_within_a_turn():
    policy, asked = make_policy("judge", PAIR | {"judge": "small"}), []
    inside = talk(USER, *step("fine"))
    state = replace(STATE, turn_choice=SMALL)
    decision = asyncio.run(policy.decide_asking(inside, state, CATALOGUE, asker("9", asked)))
    assert (decision.choice, asked) == (SMALL, [])


def test_a_deadline_takes_the_cheapest_tier_that_meets_it():
    def at(deadline_s, state=STATE):
        policy = make_policy("deadline", {"use": ["big"], "deadline_s": deadline_s, "steps": 10, "margin": 1})
        return policy.decide(talk(USER), state, CATALOGUE).choice.tier

    slow, quick = (10 * (0.5 + 300 / 60) + 0.25, 10 * (0.3 + 300 / 150) + 0.125)
    assert at(slow + 0.01) == "default"
    assert at(slow - 0.01) == "fast"
    assert at(quick - 0.01) == "fast"
    assert at(slow + 0.01, replace(STATE, elapsed_s=5.0)) == "fast"
    assert at(slow - 20, replace(STATE, requests=5)) == "default"


def test_a_budget_takes_the_quickest_it_can_pay():
    def at(usd):
        policy = make_policy("budget", {"use": ["big"], "budget_usd": usd, "steps": 10, "margin": 1})
        return policy.decide(talk(USER), STATE, CATALOGUE).choice.tier

    dear = (1000 * 6 + 9 * 1000 * 0.6 + 10 * 300 * 30) / 1e6
    assert at(dear * 1.01) == "fast"
    assert at(dear * 0.99) == "default"


def test_a_request_may_bring_its_own_deadline():
    policy = make_policy("deadline", {"use": ["big"], "deadline_s": 1000})
    hurried = talk(USER, metadata={"deadline_s": "20"})
    assert policy.decide(hurried, STATE, CATALOGUE).choice.tier == "fast"
    assert policy.decide(talk(USER, metadata={"deadline_s": "soon"}), STATE, CATALOGUE).choice.tier == "default"


@pytest.mark.parametrize("name", POLICIES)
def test_an_unknown_option_is_named_with_those_that_exist(name):
    with pytest.raises(RouteError, match=rf"policy {name}: .*speed: there is no such option.*; its options are "):
        make_policy(name, {"speed": 3})


def test_an_unknown_policy_is_refused_with_a_list():
    with pytest.raises(RouteError, match="no policy 'best'; there are fixed, weighted"):
        make_policy("best", {})
