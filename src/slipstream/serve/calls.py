"""The bodies of tool calls: where a JSON value ends, whole calls, and arguments written as XML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|$)", re.S)


class JsonEnd:
    """Finds the end of a JSON object or array that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` still belong to the value, where it ends in them."""
        for i, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


def parse_call(body: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a whole call, its keys in any order; None where it is no call."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def xml_arguments(body: str, schema: Mapping[str, Any]) -> str:
    """`<parameter=name>value</parameter>` elements as a JSON object; `schema` says which values are plain text."""
    known = schema.get("properties")
    properties = known if isinstance(known, Mapping) else {}
    arguments: dict[str, Any] = {}
    for name, value in _PARAMETER.findall(body):
        value = value.removeprefix("\n").removesuffix("\n")
        kind = properties.get(name)
        text = isinstance(kind, Mapping) and kind.get("type") == "string"
        try:
            arguments[name] = value if text else json.loads(value)
        except ValueError:
            arguments[name] = value
    return json.dumps(arguments, ensure_ascii=False)
