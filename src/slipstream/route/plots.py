"""Draws what a router buys: quality against money and against time, and the gain recovered against calls to strong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.route.decision import RouteError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Arm(Protocol):
    """A point of a frontier: `right` is the share of questions or tasks, `time_s` and `usd` of one."""

    @property
    def arm(self) -> str: ...
    @property
    def right(self) -> float: ...
    @property
    def time_s(self) -> float: ...
    @property
    def usd(self) -> float: ...


def frontiers(arms: Sequence[Arm], path: Path, title: str) -> None:
    """Quality against money and against time, side by side; PNG, SVG or PDF by the name of `path`."""
    if any(one.right != one.right for one in arms):
        raise RouteError("nobody knows which of these sessions went right, so there is no quality to draw")
    figure = _figure(9.0, 4.0)
    for place, (key, name) in enumerate((("usd", "dollars a task"), ("time_s", "seconds a task")), 1):
        axes = figure.add_subplot(1, 2, place)
        for number, one in enumerate(arms):
            plain = one.arm.startswith(("all-", "random"))
            at = (getattr(one, key), 100 * one.right)
            axes.scatter(*at, marker="o" if plain else "D", color="0.5" if plain else "tab:blue")
            axes.annotate(one.arm, at, textcoords="offset points", xytext=(6, -11 if number % 2 else 5), fontsize=8)
        axes.set_xlabel(name)
        axes.set_ylabel("right, %")
        axes.margins(0.15)
        axes.set_xlim(0, 1.35 * max(getattr(one, key) for one in arms))
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def recovery(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """curves: of each name, (share of calls to strong, share of the gain recovered)."""
    figure = _figure(5.5, 4.5)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        thin = [*curve[:: max(1, len(curve) // 300)], curve[-1]]
        axes.plot(*([100 * point[i] for point in thin] for i in (0, 1)), label=name)
    axes.plot([0, 100], [0, 100], color="0.5", linestyle="--", label="random")
    axes.axhline(50, color="0.8", linewidth=0.8)
    axes.set_xlabel("calls to the strong model, %")
    axes.set_ylabel("of its gain recovered, %")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RouteError("drawing needs matplotlib; pip install 'slipstream-llm[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise RouteError(f"cannot draw {path}: {error}") from None
