"""What a router did lately, from its ledger: for `route top`, the live page and `route explain`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.route.decision import RouteError
from slipstream.route.ledger import Source, read_rows

LATEST = 25


def ledger_of(path: Path) -> Source:
    """The ledger itself, or the one that a settings file names. Raises RouteConfigError."""
    if path.suffix != ".toml":
        return path
    from slipstream.route.config import load_config

    settings = load_config(path).ledger
    return settings.path if settings.url is None else settings.url


def summary(ledger: Source, minutes: float = 60.0, now: float | None = None) -> dict[str, Any]:
    """Totals, savings against both arms, each target and tier, and the latest decisions. Raises LedgerError."""
    rows = list(read_rows(ledger, since=(time.time() if now is None else now) - 60 * minutes))
    done = [row for row in rows if row["cost"] is not None]
    return {
        "minutes": minutes,
        "requests": len(rows),
        "open": len(rows) - len(done),
        "failed": sum(row["status"] not in ("ok", "open") for row in rows),
        "sessions": len({row["session"] for row in rows}),
        "usd": sum(_usd(row) for row in done),
        "judge_usd": sum(row["judge_cost"] or 0.0 for row in done),
        "saved": {arm: saved(done, arm) for arm in ("strong", "fast")},
        "targets": _targets(done),
        "latest": [_line(row) for row in reversed(rows[-LATEST:])],
    }


def saved(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[str, float] | None:
    """Seconds and dollars against the arm, over the steps that it was priced for; None where there are none.

    The arm's time is modelled from its tier's speeds, ours is measured.
    """
    both = [(row, row["arms"][arm]) for row in rows if arm in (row["arms"] or {})]
    if not both:
        return None
    usd, time_s = sum(_usd(row) for row, _ in both), sum(row["time_s"] for row, _ in both)
    arm_usd, arm_s = sum(one["cost"] for _, one in both), sum(one["time_s"] for _, one in both)
    return {
        "steps": len(both),
        "usd": arm_usd - usd,
        "time_s": arm_s - time_s,
        "usd_share": 1 - usd / arm_usd if arm_usd else 0.0,
        "time_share": 1 - time_s / arm_s if arm_s else 0.0,
    }


def _targets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["target"]:
            groups.setdefault((row["target"], row["tier_served"] or row["tier"]), []).append(row)
    return [
        {
            "target": target,
            "tier": tier,
            "requests": len(group),
            "share": len(group) / len(rows),
            "usd": sum(_usd(row) for row in group),
            "output": sum(row["output"] or 0 for row in group),
            "cached_share": sum(row["cached"] or 0 for row in group) / max(1, sum(row["input"] or 0 for row in group)),
            "ttft_s": median(found) if (found := [row["ttft_s"] for row in group if row["ttft_s"]]) else None,
            "time_s": median(found) if (found := [row["time_s"] for row in group if row["time_s"]]) else None,
        }
        for (target, tier), group in sorted(groups.items())
    ]


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("id", "started", "route", "agent", "policy", "status", "target", "tier", "tier_served", "time_s", "output")
    return {key: row[key] for key in keys} | {
        "reason": (row["reasons"] or [""])[0],
        "usd": _usd(row),
        "predicted_s": row["predicted_s"],
    }


def _usd(row: Mapping[str, Any]) -> float:
    return float(row["cost"] or 0.0) + float(row["judge_cost"] or 0.0)


def explain(ledger: Source, id: str) -> str:
    """A request's row for people: why it went there, what else there was, what came of it. Raises RouteError."""
    row = next(iter(read_rows(ledger, id=id)), None)
    if row is None:
        raise RouteError(f"{ledger} has no request {id!r}; answers carry their id in x-slipstream-request")
    lines = [
        f"{row['id']}  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['started']))}  {row['status']}",
        f"route {row['route']}, policy {row['policy']}, session {row['session']}, asked by {row['agent']}",
        f"went to {row['target']}/{row['tier']}" + _served(row),
        *(f"  because {reason}" for reason in row["reasons"] or ()),
    ]
    if row["score"] is not None:
        lines.append(f"  score {row['score']:.3f}")
    if row["alternatives"]:
        lines.append("alternatives                  expected      cost     read again")
        for one in row["alternatives"]:
            name = f"{one['choice']['target']}/{one['choice']['tier']}"
            lines.append(f"  {name:26} {one['time_s']:8.2f} s  ${one['cost']:.6f}  {one['reread_tokens']:7} tokens")
    for number, attempt in enumerate(row["attempts"] or (), 1):
        lines.append(f"attempt {number} failed: " + ", ".join(f"{key} {value}" for key, value in attempt.items()))
    if row["cost"] is None:
        return "\n".join([*lines, "still running"])
    lines += [
        f"tokens {row['input']} read, {row['cached']} of them cached, {row['output']} written"
        + (" (estimated)" if row["estimated"] else ""),
        f"time   {row['time_s'] or 0:.2f} s, {row['predicted_s'] or 0:.2f} s predicted"
        + (f"; first token after {row['ttft_s']:.3f} s" if row["ttft_s"] else ""),
        f"cost   ${row['cost']:.6f}, ${row['predicted_cost'] or 0:.6f} predicted"
        + (f"; deciding ${row['judge_cost']:.6f} and {row['judge_time_s']:.4f} s" if row["judge_time_s"] else ""),
    ]
    for arm, one in (row["arms"] or {}).items():
        lines.append(f"all-{arm} would have taken {one['time_s']:.2f} s and ${one['cost']:.6f} (modelled)")
    return "\n".join([*lines, *([f"error  {row['error']}"] if row["error"] else [])])


def _served(row: Mapping[str, Any]) -> str:
    served = row["tier_served"]
    return f", which served tier {served}; that is billed" if served and served != row["tier"] else ""
