"""Renders a model's chat template, which is a program by a stranger, in a sandbox with a budget.

Jinja's immutable sandbox keeps templates from Python's internals. It does not keep them from looping for ever or from
asking for gigabytes, so here every loop pass, call, filter and operator is charged to a `Meter` before it may grow
anything. Methods and filters are those that templates need; what is not listed is refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from threading import Lock
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from slipstream.errors import CheckpointError, RequestError

MAX_TEMPLATE_CHARS = 1_000_000
MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0
FREE_CHARS, CHARS_PER_INPUT_CHAR = 1 << 24, 32
_LIST_ITEM_CHARS = 32  # what a list element costs in memory, in characters

_STR_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper
    join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(),
    bytes: frozenset(),
}
_FILTERS = """
    abs capitalize count d default dictsort e escape first float indent int items join last length list lower map max
    min reject rejectattr replace reverse safe select selectattr sort string title trim unique upper
"""
_ITERATING = "join list map max min reject rejectattr select selectattr sort unique"
_WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # a field width that is large, or computed


class Budget(SecurityError):
    """The template asked for more time or memory than rendering a conversation can need."""


class Meter:
    """What one rendering may still spend."""

    def __init__(self, variables: Any) -> None:
        self.steps, self.chars, self.deadline = MAX_STEPS, 1 << 60, time.monotonic() + MAX_SECONDS
        before = self.chars
        self.weigh(variables)
        self.chars = FREE_CHARS + CHARS_PER_INPUT_CHAR * (before - self.chars)
        self.steps = MAX_STEPS

    def spend(self, chars: int = 0, steps: int = 1) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0 or time.monotonic() > self.deadline:
            raise Budget("it asks for more time or memory than a conversation can need")

    def weigh(self, value: Any, times: int = 1) -> None:
        """Spends what writing `value` out would take, `times` over."""
        if isinstance(value, str | bytes):
            self.spend(len(value) * times)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.weigh(key, times)
                self.weigh(item, times)
        elif isinstance(value, list | tuple | set | frozenset):
            for item in value:
                self.weigh(item, times)
        else:
            self.spend(8 * times)

    def items(self, values: Iterable[Any], chars: int = 0) -> Iterator[Any]:
        """The same values, each charged as it is taken."""
        for value in values:
            self.spend(chars + 8)
            yield value


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; its content is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way to declare them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """`meter` is set for the time of one rendering; `static_chars` is the template's own text."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    meter: Meter
    static_chars = 0

    def __init__(self) -> None:
        # Folding constants would run filters and operators while compiling, before any meter.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _Generation],
            finalize=_written,
        )
        self.globals = {"range": self.globals["range"], "namespace": Namespace, "dict": _dict}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters = {name: _metered(self, name, self.filters[name]) for name in _FILTERS.split()}
        self.filters |= {"tojson": _metered(self, "tojson", _tojson), "_loop": self._loop, "_text": self._text}
        self.filters["_charged"] = self._charged

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format = super().wrap_str_format(value)
        if format is None:
            return None
        source: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            _refuse_wide(source)
            self.meter.weigh([args, kwargs], source.count("{"))
            return format(*args, **kwargs)

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _refuse_wide(left)
            self.meter.weigh(right, left.count("%"))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    self.meter.spend(len(sequence) * max(times, 0) * _cost_of_item(sequence))
        elif operator == "**" and not (abs(left) < 1 << 32 and abs(right) < 64):
            raise Budget("it raises a number to a large power")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) >> 4096:
            raise Budget("it computes a very large number")
        return self._charged(result) if operator == "+" else result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self.meter
        meter.spend(__self.static_chars if isinstance(__obj, Macro) or not hasattr(__obj, "__self__") else 0)
        text, method = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str):
            if method == "replace" and len(args) >= 2:
                meter.spend(len(text) + (text.count(args[0]) + 1) * len(args[1]))
            elif method == "join" and args:
                args = (list(meter.items(args[0], len(text))), *args[1:])
                meter.weigh(args[0])
            elif method in ("split", "rsplit", "splitlines"):
                separators = text.count(args[0]) if args and args[0] else len(text)
                limit = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
                pieces = separators if limit < 0 else min(separators, limit)
                meter.spend(len(text) + pieces * (_LIST_ITEM_CHARS if args and args[0] else 4))
            else:
                meter.spend(len(text))
        result = super().call(__context, __obj, *args, **kwargs)
        return __self._charged(result)

    def compile_template(self, source: str) -> Any:
        """The template, its loops, slices and concatenations led through the meter."""
        tree = self._parse(source, None, None)
        self.static_chars = _static_chars(tree)
        _through_meter(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def _loop(self, values: Any, chars: int) -> Any:
        return self.meter.items(values, max(chars, 0))  # a template may call this too

    def _charged(self, value: Any) -> Any:
        size = len(value) * _cost_of_item(value) if isinstance(value, str | list | tuple | dict) else 0
        self.meter.spend(size)
        return value

    def _text(self, parts: list[Any]) -> str:
        self.meter.weigh(parts)
        return "".join(map(str, parts))


@pass_context  # which also keeps Jinja from calling it on constants at compile time
def _written(context: Any, value: Any) -> Any:
    context.environment.meter.weigh(value)
    return value


def _metered(sandbox: _Sandbox, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its input before and its result after."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filter(*args: Any, **kwargs: Any) -> Any:
        meter, value = sandbox.meter, args[first]
        if name in _ITERATING.split():
            value = meter.items(value)
            if name == "join":
                value = list(value)
                separator = args[first + 1] if len(args) > first + 1 else kwargs.get("d", "")
                meter.weigh(value)
                meter.weigh(separator, len(value))
        elif name == "replace":
            old, new = str(args[first + 1]), str(args[first + 2])
            meter.weigh(value)
            meter.spend((str(value).count(old) + 1) * len(new))
        elif name in ("indent", "tojson"):
            meter.weigh(value)
            width = args[first + 1] if len(args) > first + 1 else kwargs.get("width", kwargs.get("indent"))
            if isinstance(width, str | int) and (len(width) if isinstance(width, str) else width) > 64:
                raise Budget("it indents by more than 64 characters")
            meter.weigh(value, 8)
        elif name != "default" and name != "d":
            meter.weigh(value)
        return sandbox._charged(function(*args[:first], value, *args[first + 1 :], **kwargs))

    return filter


def _through_meter(tree: nodes.Template) -> None:
    """Passes each loop's values, each slice and each concatenation of the tree through a charging filter."""

    def led(node: Any, filter: str, *args: Any) -> nodes.Filter:
        constants = [nodes.Const(arg, lineno=node.lineno) for arg in args]
        return nodes.Filter(node, filter, constants, [], None, None, lineno=node.lineno)

    for loop in list(tree.find_all(nodes.For)):
        loop.iter = led(loop.iter, "_loop", sum(_static_chars(child) for child in loop.body))
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in list(parent.iter_fields()):
            values = value if isinstance(value, list) else [value]
            for i, node in enumerate(values):
                if isinstance(parent, nodes.Filter) and parent.name in ("_charged", "_text"):
                    continue
                if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                    values[i] = led(node, "_charged")
                elif isinstance(node, nodes.Concat):
                    values[i] = led(nodes.List(node.nodes, lineno=node.lineno), "_text")
            if not isinstance(value, list):
                setattr(parent, field, values[0])


def _static_chars(tree: nodes.Node) -> int:
    own = len(tree.data) if isinstance(tree, nodes.TemplateData) else 0
    return own + sum(len(node.data) for node in tree.find_all(nodes.TemplateData))


def _cost_of_item(value: Any) -> int:
    return 1 if isinstance(value, str) else _LIST_ITEM_CHARS


def _refuse_wide(format: str) -> None:
    if _WIDE_FORMAT.search(format):
        raise Budget("it formats to a large or computed width")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    _refuse_wide(format)
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as models were trained on it: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. Raises CheckpointError where the source is no valid template."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are allowed"
            )
        self._sandbox, self._lock = _Sandbox(), Lock()
        try:
            self._template = self._sandbox.compile_template(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {_line(error)}; replace it") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for `variables`. Raises RequestError where the template refuses them, fails or overspends."""
        with self._lock:  # one meter at a time
            try:
                self._sandbox.meter = Meter(variables)
                text: str = self._template.render(variables)
            except Exception as error:  # a template can raise anything
                raise RequestError(f"the chat template refuses this conversation: {_line(error)}") from error
        return text


def _line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__
