"""What routing by stage does to an agent's time and money, against all-strong. Most of it is modelled; labels say what.

python benchmarks/route_agents.py [--write] [--plot FILE]
python benchmarks/route_agents.py --record http://127.0.0.1:8000     (a running `slipstream serve`)

synthetic   made-up software tasks (`route.simulate`): chances of success, tokens and tool times are the assumptions of
            `World`; the policies, their decisions and the arithmetic of caches and switches are the real ones
recorded    what SmolLM2-135M did in `benchmarks/traces/smollm2_agent_sessions.jsonl`: real messages, errors, test
            runs, token counts and tool times; the targets' speeds and prices are assumed, nothing is said of quality

Targets (assumed, of the order of public price lists): strong 60 tok/s at $3 in, $0.30 cached, $15 out a million
tokens; its fast tier 150 tok/s at twice the price; fast 180 tok/s at a twelfth of it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipstream.bench.agent_loop import http_create, run_agent
from slipstream.bench.endpoint import HttpEndpoint
from slipstream.bench.results import Row, line, write
from slipstream.route.decision import Catalogue, Target, Tier
from slipstream.route.policies import make_policy
from slipstream.route.replay import ArmFigures, compare, read_recording, replay
from slipstream.route.simulate import World, simulate

HERE = Path(__file__).parent
SESSIONS = HERE / "traces" / "smollm2_agent_sessions.jsonl"
TASKS = range(600)
STRONG = Target(
    "strong",
    {
        "default": Tier("default", 3.0, 0.3, 15.0, 60.0, 4000.0, 0.6),
        "fast": Tier("fast", 6.0, 0.6, 30.0, 150.0, 8000.0, 0.4),
    },
    200_000,
)
FAST = Target("fast", {"default": Tier("default", 0.25, 0.025, 1.25, 180.0, 12_000.0, 0.3)}, 200_000)
CATALOGUE = Catalogue({"strong": STRONG, "fast": FAST})
RIGHT = {"strong": (0.99, 0.90), "fast": (0.97, 0.60)}  # (easy, hard) steps
WORLDS = {
    "": RIGHT,
    "-weak": RIGHT | {"fast": (0.95, 0.40)},
    "-able": RIGHT | {"fast": (0.99, 0.75)},
}
PAIR = {"strong": "strong", "fast": "fast"}
POLICIES = {
    "all-strong": ("fixed", {"use": "strong"}),
    "all-fast": ("fixed", {"use": "fast"}),
    "cascade": ("cascade", PAIR),
    "stage": ("stage", PAIR),
    "all-strong, fast tier": ("fixed", {"use": "strong/fast"}),
    "deadline 80 s": ("deadline", {"use": ["strong"], "deadline_s": 80.0, "steps": 18}),
    "stage and next": ("stage", PAIR | {"hard": ["plan", "resume", "diagnose", "stuck", "next"]}),
    "stage and next, fast tier": (
        "stage",
        PAIR | {"strong": "strong/fast", "hard": ["plan", "resume", "diagnose", "stuck", "next"]},
    ),
    "stage, fast tier": ("stage", PAIR | {"strong": "strong/fast"}),
}


def arms_of(share: float) -> dict[str, tuple[str, dict[str, Any]]]:
    random = {"weights": {"strong": share, "fast": 1 - share}, "sticky": "request"}
    return POLICIES | {f"random {share:.0%}": ("weighted", random)}


def synthetic(right: Mapping[str, tuple[float, float]], tasks: Sequence[int]) -> list[ArmFigures]:
    def run(policies: Mapping[str, tuple[str, dict[str, Any]]]) -> list[ArmFigures]:
        made = {name: lambda one=one: make_policy(*one) for name, one in policies.items()}
        return compare(simulate(made, World(right), CATALOGUE, tasks), "strong")

    share = next(arm.strong_share for arm in run(POLICIES) if arm.arm == "stage")
    return run(arms_of(share))


def recorded() -> list[ArmFigures]:
    sessions = read_recording(SESSIONS)

    def run(policies: Mapping[str, tuple[str, dict[str, Any]]]) -> list[ArmFigures]:
        return compare(
            {
                name: [replay(make_policy(*one), steps, CATALOGUE, f"s{i}") for i, steps in enumerate(sessions)]
                for name, one in policies.items()
            },
            "strong",
        )

    share = next(arm.strong_share for arm in run(POLICIES) if arm.arm == "stage")
    return run(arms_of(share))


def told(name: str, arms: Sequence[ArmFigures]) -> None:
    print(f"{name}, {arms[0].sessions} sessions; savings against all-strong, with 95% intervals over sessions")
    for arm in arms:
        print(
            f"  {arm.arm:25} done {arm.right:6.1%}  {arm.time_s:6.1f} s  ${arm.usd:.4f}  "
            f"strong {arm.strong_share:4.0%}  {arm.steps:4.1f} steps  {arm.switches:3.1f} switches  "
            f"reread {arm.reread_tokens:6.0f}  time saved {arm.time_saved}  cost saved {arm.usd_saved}"
        )


def rows_of(suffix: str, label: str, arms: Sequence[ArmFigures], which: str = "stage") -> list[Row]:
    arm = next(one for one in arms if one.arm == which)
    lost = "" if math.isnan(arm.right) else f"; {100 * arm.right_lost.value:.1f} points fewer tasks done"
    rows = []
    for kind, saved in (("time", arm.time_saved), ("cost", arm.usd_saved)):
        work = f"{kind} saved by `{which}` ({saved.low:.1%} to {saved.high:.1%}), {label}{lost}"
        rows.append(Row(f"route-{kind}-saved{suffix}", work, saved.value, "fraction"))
    return rows


class Recording:
    """Wraps a `create`; keeps the messages of the last call and, of every call, how many it saw and the usage."""

    def __init__(self, create: Callable[..., Any]) -> None:
        self.create = create
        self.steps: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.ended_s = 0.0

    def __call__(self, **body: Any) -> Any:
        if self.steps:
            self.steps[-1]["tool_s"] = round(time.monotonic() - self.ended_s, 6)
        answer = self.create(**body)
        self.ended_s, self.messages = time.monotonic(), list(body["messages"])
        counts = {"prompt_tokens": answer.usage.prompt_tokens, "output_tokens": answer.usage.completion_tokens}
        self.steps.append({"messages": len(self.messages), **counts, "tool_s": 0.0})
        return answer


def record(url: str) -> None:
    """Six agents of SmolLM2 on the bench's task; guided ones name the tool of each turn, free ones choose."""
    endpoint, lines = HttpEndpoint(url, None, None), []
    for i, temperature in enumerate((0.3, 0.5, 0.7, 0.9, 0.5, 0.9)):
        create = Recording(http_create(endpoint.url))
        with TemporaryDirectory() as scratch:
            work = run_agent(create, Path(scratch), model=endpoint.model, guided=i < 4, temperature=temperature)
        print(f"session {i}: {work.calls} calls, {'passed' if work.passed else 'not passed'}")
        kept = {"session": i, "passed": work.passed, "steps": create.steps, "messages": create.messages}
        lines.append(re.sub(r"/[\w./-]*/(?=[\w.-]+\.py)", "", json.dumps(kept)) + "\n")  # no paths of this machine
    SESSIONS.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="URL", help="record sessions, and end")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/route_agents.json")
    parser.add_argument("--plot", type=Path, help="draw the frontiers of the synthetic tasks")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record)
        return
    rows: list[Row] = []
    for suffix, right in WORLDS.items():
        arms = synthetic(right, TASKS)
        easy, hard = right["fast"]
        label = f"modelled: synthetic tasks, fast model right on {easy:.0%} of easy and {hard:.0%} of hard steps"
        told(label, arms)
        rows += rows_of(suffix, label, arms)
        if not suffix:
            rows += rows_of("-fast-tier", label, arms, "stage, fast tier")
            if arguments.plot:
                from slipstream.route.plots import frontiers

                frontiers(arms, arguments.plot, "Synthetic software tasks (assumptions: slipstream.route.simulate)")
    if SESSIONS.exists():
        arms = recorded()
        told("recorded, open-loop", arms)
        rows += rows_of(
            "-recorded", "modelled: recorded SmolLM2 agents at assumed speeds and prices, quality unknown", arms
        )
    for row in rows:
        print(line(row))
    if arguments.write:
        write(HERE / "results", "route_agents", rows, packages=["numpy"])


if __name__ == "__main__":
    main()
