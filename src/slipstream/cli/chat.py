"""`slipstream chat`: a conversation in the terminal.

One session serves all turns, so a turn prefills only its new tokens. Where standard input is not a terminal the whole
of it is one prompt, answered once as `slipstream run` does.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

import click

from slipstream.cli.options import engine_options, load, model_argument, sampling_options, sampling_params
from slipstream.cli.run import answer_once
from slipstream.cli.text import printable, speed_line
from slipstream.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream import LLM, Chunk, Completion, SamplingParams, Session

HELP = """\
/reset   forget the conversation
/stats   speed and speculation of the last answer
/quit    leave (so does Ctrl-D)
Ctrl-C stops an answer. End a line with \\ to go on in the next."""

REFRESH_S = 1 / 15


@click.command("chat")
@model_argument
@click.option("--system", default=None, help="System message of the chat template.")
@click.option("--show-drafts", is_flag=True, help="Colour the tokens that the drafter guessed right.")
@sampling_options
@engine_options
def command(model: str, system: str | None, show_drafts: bool, **options: Any) -> None:
    """Chat in the terminal; the KV cache stays between turns.

    Ctrl-C stops an answer, Ctrl-D leaves; /help lists the rest.

    \b
    Examples:
      slipstream chat smollm2
      slipstream chat smollm2 --show-drafts --temperature 0.7
      echo "What is a slipstream?" | slipstream chat smollm2
    """
    if not sys.stdin.isatty():
        return answer_once(model, None, system=system, raw=False, as_json=False, **options)
    params = sampling_params(options)
    from rich.console import Console

    console = Console(highlight=False)
    with console.status(f"loading {model}"):
        llm = load(model, options)
    if not llm.has_chat_template:
        raise RequestError(f"{model} has no chat template; use `slipstream run {model} PROMPT` to continue plain text")
    console.print(f"[bold]{model}[/] on {llm.backend.name}. /help lists the commands, Ctrl-D leaves.", style="dim")
    Chat(console, llm, params, system=system, show_drafts=show_drafts).loop()


class Chat:
    """The conversation so far, and the terminal it is held in."""

    def __init__(self, console: Console, llm: LLM, params: SamplingParams, *, system: str | None, show_drafts: bool):
        self.console, self.llm, self.params, self.show_drafts = console, llm, params, show_drafts
        self.opening = [{"role": "system", "content": system}] if system is not None else []
        self.last: Completion | None = None
        self.session = self.start()

    def start(self) -> Session:
        session = self.llm.session()
        session.messages = list(self.opening)
        return session

    def loop(self) -> None:
        """Read and answer until /quit or the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        commands: dict[str, Callable[[], None]] = {"/help": self.help, "/reset": self.reset, "/stats": self.stats}
        while (said := self.read()) is not None and said != "/quit":
            if said in commands:
                commands[said]()
            elif said.startswith("/"):
                self.console.print(f"no command {said.split()[0]}; /help lists them", style="dim", markup=False)
            elif said:
                self.answer(said)

    def read(self) -> str | None:
        """The next message, or None at the end of input."""
        lines: list[str] = []
        while True:
            try:
                line = input("… " if lines else "> ")
            except EOFError:
                self.console.print()
                return None
            except KeyboardInterrupt:
                self.console.print("\nCtrl-D or /quit leaves", style="dim")
                lines.clear()
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines).strip()

    def help(self) -> None:
        self.console.print(HELP, style="dim", markup=False)

    def reset(self) -> None:
        self.session.close()
        self.session = self.start()
        self.console.print("new conversation", style="dim")

    def stats(self) -> None:
        if self.last is None:
            return self.console.print("nothing answered yet", style="dim")
        done, said = self.last, self.last.speculation
        self.console.print(
            f"{speed_line(done)}\nprompt {done.prompt_tokens} tokens, {done.cached_tokens} from the KV cache, "
            f"prefill {done.timing.prefill_s:.3f} s, decode {done.timing.decode_s:.3f} s\n"
            f"drafter {said.drafter}: {said.rounds} rounds, {said.accepted} of {said.drafted} drafts accepted",
            style="dim",
        )

    def answer(self, said: str) -> None:
        """Stream one answer. A bad request is reported and forgotten; the conversation goes on."""
        try:
            self.draw(self.session.stream_chat(said, self.params))
        except RequestError as error:
            self.console.print(str(error), style="red", markup=False)

    def draw(self, chunks: Iterator[Chunk]) -> None:
        """Show chunks as they come, with the speed below, until the last or Ctrl-C."""
        from rich.live import Live

        paragraph, shown, tokens, started = _Paragraph(self.console), 0.0, 0, time.perf_counter()
        with (
            _interruptible() as interrupted,
            contextlib.closing(cast("Generator[Chunk]", chunks)),  # closing it early cancels the answer
            Live(console=self.console, auto_refresh=False, transient=True) as live,
        ):
            for chunk in chunks:
                for piece in chunk.pieces:
                    paragraph.append(printable(piece.text), "green" if self.show_drafts and piece.drafted else "")
                first = tokens == 0
                tokens += len(chunk.token_ids)
                now = time.perf_counter()
                if first:
                    started = now  # the rate is of decoding; the first token's wait is prefill
                elif now - shown > REFRESH_S:
                    live.update(paragraph.tail(f"{tokens / (now - started):.0f} tok/s"), refresh=True)
                    shown = now
                if chunk.completion is not None:
                    self.last = chunk.completion
                if interrupted():
                    break
            live.update("", refresh=True)
        paragraph.end()
        if interrupted():
            self.console.print("stopped", style="dim")
        elif self.last is not None:
            self.console.print(speed_line(self.last), style="dim")


class _Paragraph:
    """Text that grows at its end. Finished lines are printed for good; only the last one is still drawn over."""

    def __init__(self, console: Console) -> None:
        from rich.text import Text

        self.console, self.line = console, Text()

    def append(self, text: str, style: str) -> None:
        head, *lines = text.split("\n")
        self.line.append(head, style)
        for line in lines:
            self.end()
            self.line.append(line, style)

    def tail(self, status: str) -> Any:
        """The unfinished line above a status line, for a live display."""
        from rich.console import Group
        from rich.text import Text

        *full, last = self.line.wrap(self.console, self.console.width) or [Text()]
        for line in full:
            self.console.print(line)
        ended, kept = (len(t) - len(t.rstrip()) for t in (self.line.plain, last.plain))
        self.line = last.copy().append(" " * (ended - kept))  # wrapping drops spaces at the edge
        return Group(last, Text(status, "dim"))

    def end(self) -> None:
        self.console.print(self.line)
        self.line = self.line.blank_copy()


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, so that a round is never torn; a second Ctrl-C interrupts at once."""
    pressed = False

    def press(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
