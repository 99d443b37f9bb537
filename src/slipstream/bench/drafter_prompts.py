"""Prompts to judge a drafter by, in four tasks. All were written for this; none comes from where drafters are trained.

chat, code and copy begin with the prompts that every measurement uses (`workloads`); math is short word problems.
"""

from __future__ import annotations

from typing import Literal, get_args

from slipstream.bench.workloads import Prompt, PromptSet, prompts

Task = Literal["chat", "code", "copy", "math"]
TASKS: tuple[Task, ...] = get_args(Task)
TOKENS = 128
"""Tokens of an answer."""

_MORE_CHAT = (
    "My sister turns thirty next week and loves gardening. Suggest five presents for less than 40 euros.",
    "Is it better to water plants in the morning or in the evening? Give your reasons.",
    "Write an e-mail to my landlord: the heating has been cold for three days, and I would like it repaired soon.",
    "What is the difference between weather and climate?",
    "How can I fall asleep faster when I am thinking about work?",
    "Describe a day in the life of a lighthouse keeper a hundred years ago.",
    "Which is healthier, swimming or running, and for whom?",
    "Explain inflation with an example from a bakery.",
    "Plan a weekend for two in the mountains, with one rainy day.",
    "Why do cats purr?",
)
_MORE_CODE = (
    "Write a Python generator that yields the lines of a large file in reverse order without loading it whole.",
    "Write a Go function that merges two sorted slices of integers into one.",
    "Write a regular expression that matches ISO dates such as 2024-05-31, and explain its parts.",
    "Write a Python context manager that measures how long its block takes and prints it in milliseconds.",
    "Convert this loop to a list comprehension and explain it:\n\n"
    "result = []\nfor x in numbers:\n    if x % 2 == 0:\n        result.append(x * x)",
    "Write a Rust function that counts how often each word occurs in a string and returns a HashMap.",
    "Write an HTML page with a form that asks for a name and an e-mail address, and validate both in JavaScript.",
)
_MATH = (
    "A baker sells 14 loaves in the morning and half as many in the afternoon, at 3 euros each. What does he earn?",
    "Tom reads 20 pages a day. His book has 340 pages and he has read for 8 days. How many days are left?",
    "A train covers 90 km in 45 minutes. How far does it go in 2 hours at the same speed?",
    "Anna has 3 boxes of 12 eggs. She uses 7 eggs for a cake and breaks 2. How many eggs are left?",
    "A shirt costs 40 euros. It is reduced by 15%, then by 5 euros more. What does it cost now?",
    "The sum of three consecutive numbers is 72. Which numbers are they?",
    "A tank holds 500 litres. Two pipes fill it with 12 and 8 litres a minute. How long does it take?",
    "Lena is twice as old as her brother. In five years they will be 31 together. How old are they now?",
    "A garden is 18 m long and 11 m wide. How many metres of fence go around it, with a gate of 2 m left open?",
    "Of 28 pupils three quarters play an instrument, and a third of those play the piano. How many play the piano?",
    "A car uses 6 litres for 100 km. Fuel costs 1.80 euros a litre. What does a trip of 350 km cost?",
    "Five friends share a bill of 87.50 euros equally and each leaves a tip of 1.50. What does each one pay?",
)


def task_prompts(task: Task) -> list[Prompt]:
    """The prompts of a task, with answers of `TOKENS` tokens."""
    more = {"chat": _MORE_CHAT, "code": _MORE_CODE, "math": _MATH, "copy": ()}[task]
    sets: dict[Task, PromptSet] = {"chat": "chat", "code": "code", "copy": "copy"}
    known = [prompt.messages for prompt in prompts(sets[task])] if task in sets else []
    chosen = [*known, *(({"role": "user", "content": text},) for text in more)]
    return [Prompt(f"{task}-{i}", messages, TOKENS) for i, messages in enumerate(chosen, 1)]
