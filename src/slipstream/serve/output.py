"""From an answer's text to what a client sees: content, reasoning and tool calls, while it streams.

Models mark these parts by tags of their own; a tag may be cut anywhere by rounds, so the end of the text is held back
where it may begin one. What looks like a tool call and is none comes out as content: nothing is lost.

    think      <think> reasoning </think> content                                            Qwen3, DeepSeek, MiMo
    hermes     <tool_call>{"name": .., "arguments": ..}</tool_call>                           Hermes, Qwen, SmolLM
               <tool_call><function=f><parameter=p>value</parameter></function></tool_call>   Qwen3-Coder, MiMo
    llama3     [<|python_tag|>]{"name": .., "parameters": ..}[; ..]                           Llama 3
    mistral    [TOOL_CALLS][{"name": .., "arguments": ..}, ..]  or  [TOOL_CALLS]f[ARGS]{..}   Mistral
    harmony    <|channel|>analysis|final|commentary to=functions.f<|message|> .. <|end|>      gpt-oss
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.serve.calls import JsonEnd, parse_call, xml_arguments

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEADER = 300  # characters after which a lone `{` is no tool call
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN_CALLS = " \n,]}"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """The `index`-th tool call begins; its arguments follow as `Arguments`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    index: int
    text: str


Delta = Content | Reasoning | CallStart | Arguments


@dataclass(frozen=True)
class Style:
    """How a model marks its output. think: the tags around reasoning. tools: a format of the table above, or None."""

    think: tuple[str, str] | None = None
    tools: str | None = None


def detect_style(template: str | None) -> Style:
    """By the tags that the model's own chat template writes. A template that knows of no tools gets `hermes`."""
    source = template or ""
    think = ("<think>", "</think>") if "</think>" in source else None
    if "<|channel|>" in source:
        return Style(None, "harmony")
    if "[TOOL_CALLS]" in source:
        return Style(think, "mistral")
    if "<|python_tag|>" in source or ('"parameters"' in source and "<tool_call>" not in source):
        return Style(think, "llama3")
    return Style(think, "hermes")


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """One answer. `reasoning` tells whether the next text is a thought.

    most_calls: later calls are dropped, and `full` tells that the last one allowed is complete.
    """

    def __init__(
        self,
        style: Style,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        thinking: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """tools: name -> JSON schema of the arguments; None leaves calls alone. thinking: the prompt opened one."""
        self.calls = 0
        self.full = False
        self.reasoning = thinking
        self._style, self._tools, self._most = style, tools or {}, most_calls
        self._format = style.tools if tools is not None or style.tools == "harmony" else None
        self._free = self._format is None and style.think is None  # there are no tags: all of it is content
        self._text = ""
        self._space = ""  # white space that a tool call would swallow
        self._begun = False
        self._inside = ""  # the tag of the tool calls that the text is in
        self._current, self._name = -1, ""  # the call whose arguments follow
        self._streaming = self._done = self._after_call = False
        self._end = JsonEnd()
        self._over = False
        self._machine = self._harmony() if style.tools == "harmony" else self._plain()
        next(self._machine)

    def push(self, text: str) -> list[Delta]:
        """What `text` settles."""
        if self._free:
            return [Content(text)] if text else []
        return merged(self._machine.send(text)) if text else []

    def finish(self) -> list[Delta]:
        """The answer is over: what was held back, as far as it makes sense."""
        self._over = True
        return merged(self._machine.send(""))

    # Each machine is a coroutine: it is sent text, and yields the deltas that are settled.

    def _plain(self) -> Any:
        out: list[Delta] = []
        while True:
            self._text += yield out
            out = []
            while self._step(out):
                pass
            if self._over:
                out += self._rest()

    def _step(self, out: list[Delta]) -> bool:
        """One part of the held text; False where more text is needed."""
        if self.reasoning:
            assert self._style.think is not None
            before, tag = self._until((self._style.think[1],))
            if before:
                out.append(Reasoning(before))
            if tag is None:
                return False
            self.reasoning, self._begun = False, False
            return True
        if self._format == "llama3" and not self._begun:
            verdict = self._llama_call(out)
            if verdict is not None:
                return verdict
        tags = [self._style.think[0]] if self._style.think and not self._begun else []
        tags += {"hermes": ["<tool_call>"], "mistral": ["[TOOL_CALLS]"], "llama3": ["<|python_tag|>"]}.get(
            self._format or "", []
        )
        if self._inside:
            return self._call(out)
        before, tag = self._until(tags)
        self._content(before, out)
        if tag is None:
            return False
        if self._style.think and tag == self._style.think[0]:
            self.reasoning = True
        elif tag == "<|python_tag|>":
            self._begun = False
        else:
            self._inside = tag
        return True

    def _call(self, out: list[Delta]) -> bool:
        return self._mistral_call(out) if self._inside == "[TOOL_CALLS]" else self._hermes_call(out)

    def _hermes_call(self, out: list[Delta]) -> bool:
        """A whole call up to its closing tag, its JSON arguments as they come."""
        if self._current < 0:
            if header := _HEADER.match(self._text):
                self._start(header[1], out)
                self._text = self._text[header.end() :]
                self._end = JsonEnd()
                self._streaming = True
                return True
            if function := _FUNCTION.match(self._text):
                self._start(function[1], out)
                self._streaming = False
                return True
            return self._whole_call(out)
        if self._streaming:
            end = self._end.feed(self._text)
            args, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
            if args:
                self._arguments(args, out)
            if end is None:
                return False
            self._streaming, self._done = False, True
        if (at := self._text.find("</tool_call>")) < 0 and not self._over:
            if self._done:
                self._text = self._text[-len("</tool_call>") :]
            return False
        body = self._text if at < 0 else self._text[:at]
        self._text = "" if at < 0 else self._text[at + len("</tool_call>") :]
        if not self._done:
            self._arguments(xml_arguments(body, self._tools.get(self._name, {})), out)
        self._leave()
        return bool(self._text)

    def _whole_call(self, out: list[Delta]) -> bool:
        """A call whose parts come in another order is read once it is whole."""
        at = self._text.find("</tool_call>")
        if at < 0 and not self._over:
            return False
        body = self._text if at < 0 else self._text[:at]
        self._text = "" if at < 0 else self._text[at + len("</tool_call>") :]
        call = parse_call(body)
        if call:
            self._start(call[0], out)
            self._arguments(call[1], out)
        else:
            self._content(f"<tool_call>{body}" + ("</tool_call>" if at >= 0 else ""), out)
        self._leave()
        return bool(self._text)

    def _mistral_call(self, out: list[Delta]) -> bool:
        if self._current < 0:
            self._text = self._text.lstrip(_BETWEEN_CALLS)
            if self._text.startswith("[TOOL_CALLS]"):
                self._text = self._text[len("[TOOL_CALLS]") :]
            if self._text and "[TOOL_CALLS]".startswith(self._text):
                return False
            self._text = self._text.removeprefix("[").lstrip()
            header = _HEADER.match(self._text) or _NAMED.match(self._text)
            if header is None:
                return False
            self._start(header[1], out)
            self._text, self._end = self._text[header.end() :], JsonEnd()
            return True
        end = self._end.feed(self._text)
        args, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        if args:
            self._arguments(args, out)
        if end is None:
            return False
        self._leave(stay=True)
        return bool(self._text)

    def _llama_call(self, out: list[Delta]) -> bool | None:
        """None: this is no tool call, nor may it become one."""
        if self._current >= 0:
            end = self._end.feed(self._text)
            args, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
            if args:
                self._arguments(args, out)
            if end is None:
                return False
            self._leave()
            self._begun, self._after_call = False, True
            return bool(self._text)
        if self._after_call:
            self._text = self._text.lstrip("}; \n")
        stripped = self._text.lstrip()
        if stripped.startswith("<|python_tag|>"):
            self._text = stripped[len("<|python_tag|>") :]
            return True
        if not stripped or "<|python_tag|>".startswith(stripped):
            return False
        header = _HEADER.match(self._text)
        if header and header[1] in self._tools:
            self._start(header[1], out)
            self._text, self._end = self._text[header.end() :], JsonEnd()
            return True
        if stripped[0] != "{" or header or len(stripped) > _LONGEST_HEADER or self._over:
            return None
        return False

    def _harmony(self) -> Any:
        """Messages of channels; the prompt ended within the header of the first."""
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        kind: str | None = None
        out: list[Delta] = []
        while True:
            self._text += yield out
            out = []
            while True:
                if kind is None:
                    at = self._text.find("<|message|>")
                    if at < 0:
                        if self._over and self._text.strip() and "<|" not in self._text:
                            out.append(Content(self._text))
                            self._text = ""
                        break
                    header, self._text = self._text[:at], self._text[at + len("<|message|>") :]
                    recipient = re.search(r"to=functions\.([\w.-]+)", header)
                    kind = "call" if recipient else "analysis" if "<|channel|>analysis" in header else "final"
                    self.reasoning = kind == "analysis"
                    if recipient:
                        self._start(recipient[1], out)
                before, tag = self._until(ends)
                if before:
                    if kind == "call":
                        self._arguments(before, out)
                    else:
                        out.append(Reasoning(before) if kind == "analysis" else Content(before))
                if tag is None:
                    break
                if kind == "call":
                    self._leave()
                kind, self.reasoning = None, False

    def _until(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """Text before the first of `tags`, and that tag; without one, all but an end that may begin one."""
        text = self._text
        found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._text = text[at + len(tag) :]
            return text[:at], tag
        held = 0 if self._over else max((_overlap(text, tag) for tag in tags), default=0)
        self._text = text[len(text) - held :]
        return text[: len(text) - held], None

    def _content(self, text: str, out: list[Delta]) -> None:
        if not self._begun and (self._style.think or self.calls):
            text = text.lstrip()
        if not text:
            return
        text, self._space = self._space + text, ""
        if self._format:
            stripped = text.rstrip()
            text, self._space = stripped, text[len(stripped) :]
        if text:
            self._begun = True
            out.append(Content(text))

    def _start(self, name: str, out: list[Delta]) -> None:
        self._current, self._name, self._done, self._space = self.calls, name, False, ""
        self.calls += 1
        if self._most is None or self._current < self._most:
            out.append(CallStart(self._current, new_call_id(), name))

    def _arguments(self, text: str, out: list[Delta]) -> None:
        if self._most is None or self._current < self._most:
            out.append(Arguments(self._current, text))

    def _leave(self, stay: bool = False) -> None:
        self._current, self._streaming, self._done = -1, False, False
        self.full = self._most is not None and self.calls >= self._most
        if not stay:
            self._inside, self._begun = "", False

    def _rest(self) -> list[Delta]:
        out: list[Delta] = []
        text, self._text = self._text, ""
        if self._space and not self.calls:
            out.append(Content(self._space))
        if self.calls and self._inside:
            text = text.strip(_BETWEEN_CALLS)
        if text.strip() and self._current < 0 and not self._after_call:
            out.append(Reasoning(text) if self.reasoning else Content(self._inside + text))
        self._space = ""
        return out


def merged(deltas: list[Delta]) -> list[Delta]:
    """The same, neighbours of one kind joined."""
    if len(deltas) < 2:
        return deltas
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + delta.text)
        elif isinstance(delta, Arguments) and isinstance(last, Arguments) and last.index == delta.index:
            out[-1] = Arguments(last.index, last.text + delta.text)
        else:
            out.append(delta)
    return out


def _overlap(text: str, tag: str) -> int:
    """The longest end of `text` that begins `tag`, but is not all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
