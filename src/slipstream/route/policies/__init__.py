"""The policies, one a file. To add one: a frozen pydantic dataclass with `name` and `decide`, and a line in POLICIES.

Its fields are its options; pydantic checks them. A policy that asks a model first has `decide_asking`, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from slipstream.route.decision import Policy, RouteError

POLICIES = {
    "fixed": ("fixed", "Fixed"),
    "weighted": ("weighted", "Weighted"),
    "rules": ("rules", "Rules"),
    "stage": ("stage", "Stage"),
    "judge": ("judge", "Judge"),
    "learned": ("learned", "Learned"),
    "cascade": ("cascade", "Cascade"),
    "deadline": ("deadline", "Deadline"),
    "budget": ("deadline", "Budget"),
}


def make_policy(name: str, options: Mapping[str, Any]) -> Policy:
    """The policy `name` with `options`. Raises RouteError that names each option at fault, and those that exist."""
    if name not in POLICIES:
        raise RouteError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    file, kind = POLICIES[name]
    cls = getattr(importlib.import_module(f"{__name__}.{file}"), kind)
    try:
        policy: Policy = TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        wrong = "; ".join(_said(one["loc"], one["msg"]) for one in error.errors())
        known = ", ".join(cls.__dataclass_fields__)
        raise RouteError(f"policy {name}: {wrong}; its options are {known}") from None
    return policy


def _said(loc: tuple[int | str, ...], message: str) -> str:
    place = ".".join(map(str, loc))
    message = message.removeprefix("Value error, ")
    if message == "Unexpected keyword argument":
        message = "there is no such option"
    return f"{place}: {message}" if place else message
