"""The fixed prompts that every measurement uses, in three sets.

chat: everyday questions. code: programming tasks. copy: a text of about 1,000 tokens to repeat or edit, where most of
the answer already stands in the prompt. All texts were written for this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

from slipstream.errors import RequestError

Message = dict[str, str]
PromptSet = Literal["chat", "code", "copy"]


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer, with a name for tables and an answer length, in tokens, that suits it."""

    id: str
    messages: tuple[Message, ...]
    max_tokens: int


CHAT = (
    "Why is the sky blue during the day and red in the evening?",
    "I have eggs, spinach, half an onion and some stale bread. What can I cook for two people tonight?",
    "Explain to a ten-year-old how a vaccine works, without using difficult words.",
    "My neighbour plays loud music every night. Write a polite note that I can put in his letter box.",
    "What should I see in Lisbon if I have only one day and like to walk?",
    "Give me a plan for learning to play the guitar in three months with half an hour a day.",
    "What are the advantages and disadvantages of working from home for a small company?",
    "Tell me a short story about a clockmaker who is afraid of being late.",
    "How do noise-cancelling headphones work, and why do they work better on planes than in a café?",
    "Summarise the causes of the First World War in five bullet points.",
)

CODE = (
    "Write a Python function that checks whether a string of brackets ()[]{} is balanced, with a docstring and tests.",
    "Write a C function that reverses a singly linked list in place. Explain each step in a comment.",
    "Here is a SQL table: orders(id, customer, day, amount). Write a query for the ten customers who spent most in "
    "2024, with the number of their orders.",
    "Write a Bash script that renames all .jpeg files of a folder to .jpg and prints how many it renamed.",
    "Explain what this Python code prints and why:\n\n"
    "def add(item, to=[]):\n    to.append(item)\n    return to\n\nprint(add(1), add(2))",
    "Write a JavaScript class for an LRU cache with get(key) and put(key, value), both in constant time.",
    "Write a Python class Matrix with addition, multiplication and transpose, and an example of its use.",
)

# A small model copies reliably only what it has copied before, so each conversation shows the text twice.
COPY = {
    "repeat-prose": ("lighthouse.txt", "{text}", "Repeat this text word for word:", "Repeat it once more."),
    "edit-minutes": (
        "minutes.txt",
        "{text}",
        "Repeat these minutes word for word:",
        "Print the minutes again, with Nora Ellis renamed to Laura Ellis.",
    ),
    "edit-code": (
        "inventory.txt",
        "```python\n{text}```",
        "Repeat this Python module:",
        "Print the module again, with StockRegister renamed to Warehouse.",
    ),
}


@cache
def prompts(name: PromptSet) -> tuple[Prompt, ...]:
    """The prompts of a set. Raises RequestError for a set that does not exist."""
    if name == "chat":
        return tuple(Prompt(f"chat-{i}", (_user(text),), 128) for i, text in enumerate(CHAT, 1))
    if name == "code":
        return tuple(Prompt(f"code-{i}", (_user(text),), 192) for i, text in enumerate(CODE, 1))
    if name == "copy":
        return tuple(_copy(id, *parts) for id, parts in COPY.items())
    raise RequestError(f"no prompt set {name!r}; choose one of {', '.join(get_args(PromptSet))}")


def _copy(id: str, file: str, frame: str, first: str, again: str) -> Prompt:
    framed = frame.format(text=text(file))
    return Prompt(
        f"copy-{id}",
        (_user(f"{first}\n\n{framed}"), {"role": "assistant", "content": framed}, _user(again)),
        400,
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def text(file: str) -> str:
    """One of the long texts by file name."""
    return (files(__package__) / "texts" / file).read_text(encoding="utf-8")


def long_text() -> str:
    """All long texts in a row, about 2,900 tokens: for prefill and accuracy."""
    return "\n\n".join(text(file) for file, *_ in COPY.values())
