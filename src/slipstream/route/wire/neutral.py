"""A request and an answer in no API's form: what the three wires are read into and written from.

A field or block without a form here is listed in `Ask.only_here`: such a request goes to targets of its own wire alone,
where its body travels as it came. `Ask.hints` are fields that change no text; another wire leaves them out, and the
answer's headers say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.route.decision import Conversation, Message, ToolCall

Json = dict[str, Any]
BYTES_PER_TOKEN = 4
"""Of English and code on average; used only until a target has counted."""
IMAGE_TOKENS = 1000


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Image:
    """url: an address or a data: URL, which is passed on and never fetched here."""

    url: str
    detail: str | None = None


@dataclass(frozen=True)
class Thought:
    """Reasoning. seal: what lets the API `by` read it again: a signature or encrypted text. hidden: seal is all."""

    text: str
    seal: str | None = None
    by: str | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Call:
    """A tool call; arguments as the JSON text that was written."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Result:
    """What a tool answered."""

    id: str
    parts: tuple[Text | Image, ...]
    is_error: bool | None = None


Part = Text | Image | Thought | Call | Result
Speaker = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Turn:
    role: Speaker
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


@dataclass(frozen=True)
class Format:
    """The JSON that an answer must be; schema None: any object."""

    schema: Json | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


@dataclass
class Ask:
    """A request. body: as the client sent it. settings: by the names of OpenAI's Chat API, only those that were set.

    tool_choice: auto, none, required, or `=name`. effort: of reasoning; `none` turns it off, None says nothing.
    """

    wire: str
    body: Json
    model: str
    turns: list[Turn] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    tool_choice: str | None = None
    parallel: bool | None = None
    format: Format | None = None
    effort: str | None = None
    settings: Json = field(default_factory=dict)
    stream: bool = False
    wants_usage: bool = True
    only_here: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)
    session: str | None = None
    continues: str | None = None

    @property
    def images(self) -> int:
        found = 0
        for turn in self.turns:
            for part in turn.parts:
                inner = part.parts if isinstance(part, Result) else (part,)
                found += sum(isinstance(one, Image) for one in inner)
        return found

    def conversation(self, agent: str = "main") -> Conversation:
        """As policies read it."""
        messages: list[Message] = []
        size = sum(bytes_of(str(tool.schema)) + bytes_of(tool.description or "") for tool in self.tools)
        images = 0
        for turn in self.turns:
            rest = [part for part in turn.parts if not isinstance(part, Result)]
            for part in turn.parts:
                if isinstance(part, Result):
                    text = _joined(part.parts)
                    shown = sum(isinstance(one, Image) for one in part.parts)
                    messages.append(Message("tool", text, tool_call_id=part.id, is_error=part.is_error, images=shown))
                    size, images = size + bytes_of(text), images + shown
            if rest or not turn.parts:
                calls = tuple(ToolCall(c.id, c.name, c.arguments) for c in rest if isinstance(c, Call))
                shown = sum(isinstance(one, Image) for one in rest)
                text = _joined(rest)
                messages.append(Message(turn.role, text, calls, images=shown))
                size += bytes_of(text) + sum(bytes_of(call.arguments) for call in calls)
                images += shown
        tokens = size // BYTES_PER_TOKEN + 4 * len(messages) + IMAGE_TOKENS * images
        return Conversation(
            tuple(messages), tuple(tool.name for tool in self.tools), max(1, tokens),
            self.settings.get("max_tokens"), agent, self.metadata,
        )  # fmt: skip


def bytes_of(text: str) -> int:
    """Its length in UTF-8, by which tokens are estimated: four letters are one, four Chinese characters three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _joined(parts: Any) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


# What an answer is made of, in the order in which it comes. Calls may be interleaved, each with its own `index`.


@dataclass(frozen=True)
class Start:
    id: str
    model: str


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ThoughtDelta:
    text: str


@dataclass(frozen=True)
class ThoughtEnd:
    """A thought is over. hidden: its text was never shown, `seal` is all of it."""

    seal: str | None = None
    by: str | None = None
    hidden: bool = False


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallDelta:
    index: int
    text: str


@dataclass(frozen=True)
class Stop:
    """reason: stop, length, tool_calls, stop_sequence, refusal or pause."""

    reason: str
    sequence: str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens. input: the whole prompt, of which `cached` were read from and `written` were put into a cache.

    tier: what the target says served this; None where it says nothing.
    """

    input: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0
    reasoning: int = 0
    tier: str | None = None


@dataclass(frozen=True)
class Failure:
    """An error within a stream or an answer. status: as HTTP would have said it."""

    status: int
    message: str
    code: str | None = None


@dataclass(frozen=True)
class End:
    """Nothing more comes, and all of it was there."""


Event = Start | TextDelta | ThoughtDelta | ThoughtEnd | CallStart | CallDelta | Stop | Usage | Failure | End

TOKENS = (TextDelta, ThoughtDelta, ThoughtEnd, CallStart, CallDelta)
"""Events that hold something the model wrote."""


class Fields:
    """Reads a JSON object, and knows which fields nobody asked for."""

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._rest = dict(body)
        self._where = f"{where}." if where else ""

    def take(self, name: str) -> Any:
        """The field's value; None where it is not there or null."""
        return self._rest.pop(name, None)

    def left(self, *hints: str) -> tuple[list[str], list[str]]:
        """(fields without a neutral form, those of them that are `hints`), nulls not counted."""
        rest = [name for name, value in self._rest.items() if value is not None]
        return (
            [self._where + name for name in rest if name not in hints],
            [self._where + name for name in rest if name in hints],
        )


class NotCarried(Exception):
    """A request that another wire has no words for. fields: their names in the client's own wire."""

    def __init__(self, fields: list[str]) -> None:
        super().__init__(", ".join(fields))
        self.fields = fields


def as_int(value: Any) -> int:
    """A count from an answer; 0 for what is none, or more than any database holds."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 48 else 0


def as_text(value: Any) -> str:
    """Text from an answer; half of a surrogate pair, which UTF-8 cannot say, is a question mark."""
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def as_dict(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
