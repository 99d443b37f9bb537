"""Prompts that the shipped drafter learns from: `python benchmarks/training_prompts.py --out prompts.jsonl`.

Made of what a Python installation holds and of GSM8K's training questions, none of it near the prompts that drafters
are judged by (`slipstream.bench.drafter_prompts`): functions and docstrings of installed packages (write this, explain
this, complete this), their README texts (summarise, answer, rewrite), and templates of what people ask assistants.
Only packages under permissive licences are read; FILE.sources.json says which, under what, and how many prompts each.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Zlib|Unlicense|0BSD)\b", re.I)
COPYLEFT = re.compile(r"\b(A?L?GPL|MPL|EUPL|GNU)", re.I)
LONGEST = 1800  # characters taken of a source
ENOUGH = 3000  # functions read of a package

FROM_DOCSTRING = (
    "Write a Python function `{name}`. {doc}",
    "Write a function in Python for this: {doc}",
    "Implement the following in Python:\n\n{signature}\n    \"\"\"{doc}\"\"\"",
    "How do I do this in Python? {doc}",
    "Write unit tests for a Python function described as: {doc}",
    "Write a JavaScript function that does this: {doc}",
    "I need a small script. {doc} Please add comments.",
)  # fmt: skip
FROM_CODE = (
    "Explain what this code does:\n\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n```python\n{code}\n```",
    "Review this code and suggest improvements:\n\n```python\n{code}\n```",
    "Add type hints to this function:\n\n```python\n{code}\n```",
    "Refactor this function so that it is easier to read:\n\n```python\n{code}\n```",
    "Are there bugs in this function?\n\n{code}",
    "Translate this function to JavaScript:\n\n```python\n{code}\n```",
)
FROM_TEXT = (
    "Summarise the following text:\n\n{text}",
    "Summarise this in three bullet points:\n\n{text}",
    "Rewrite the following text in simpler words:\n\n{text}",
    "What is the main idea of this text?\n\n{text}",
    "Write three questions that this text answers, with their answers:\n\n{text}",
    "Extract the key facts from this text as a list:\n\n{text}",
)
FROM_QUESTION = (
    "{question}",
    "{question}",
    "Solve this step by step: {question}",
    "{question} Show your work.",
    "Write a Python program that solves this problem: {question}",
)
TASKS = (
    "Explain {topic} to a beginner.", "What are the advantages and disadvantages of {topic}?",
    "Give me five tips about {topic}.", "Write a short story about {topic}.", "Write a poem about {topic}.",
    "What should I know before I start with {topic}?", "Write an e-mail to a colleague about {topic}.",
    "How has {topic} changed over time?", "Make a one-week plan for somebody interested in {topic}.",
    "What are common mistakes with {topic}?", "Describe {topic} in three sentences.",
    "Write a blog post about {topic}.", "Which questions would you ask an expert on {topic}?",
    "Compare {topic} with {other}.", "Write a dialogue between two people about {topic}.",
    "Write a product description for something that helps with {topic}.", "Why is {topic} important?",
    "List ten words related to {topic} and explain each.", "Argue for and against {topic}.",
    "Write a speech about {topic}.", "What is {topic}?", "How does {topic} work?",
    "Give me a recipe or a routine that has to do with {topic}.", "Write a quiz about {topic} with four questions.",
    "Tell me about {topic} and {other}.", "How can I get better at {topic}?", "Who should care about {topic}, and why?",
    "Write a letter to a friend who is worried about {topic}.", "Brainstorm names for a club about {topic}.",
    "Turn this into a formal sentence: hey, we gotta talk about {topic} soon.",
)  # fmt: skip
TOPICS = (
    "chess", "baking bread", "solar panels", "the French Revolution", "public speaking", "photosynthesis", "jazz",
    "remote work", "electric bicycles", "learning Spanish", "black holes", "budgeting", "vaccines", "meditation",
    "hiking", "the Roman Empire", "machine learning", "pottery", "coffee", "plate tectonics", "job interviews",
    "dogs", "cats", "recycling", "the stock market", "wind energy", "classical music", "knitting", "databases",
    "time management", "the human heart", "volcanoes", "cooking rice", "marathon training", "antibiotics",
    "the printing press", "bees", "photography", "public libraries", "insurance", "origami", "the water cycle",
    "cryptography", "yoga", "the Silk Road", "camping", "nutrition", "dinosaurs", "graphic design", "friendship",
    "urban planning", "the internet", "tea", "film making", "statistics", "astronomy", "car maintenance", "soccer",
    "Shakespeare", "climate policy", "sleep hygiene", "vegetarian food", "the immune system", "fishing", "robots",
    "painting with watercolours", "the Olympic Games", "negotiation", "mountains", "a lost key", "an old bridge",
    "travelling by train", "a robot that dreams", "parenting", "a village school", "probability", "free will",
    "version control", "functional programming", "regular exercise", "calligraphy", "genetics", "whales", "museums",
    "house plants", "home repairs", "anxiety", "habit building", "the moon landing", "opera", "spreadsheets",
    "web design", "sorting algorithms", "operating systems", "recursion", "a birthday party", "moving to a new city",
    "customer service", "street food", "cheese", "rivers", "deserts", "snow", "electricity", "magnets", "batteries",
)  # fmt: skip


def licence(package: Distribution) -> str | None:
    """Its permissive licence, or None."""
    meta = package.metadata
    named = [*meta.get_all("Classifier", []), meta.get("License-Expression") or "", (meta.get("License") or "")[:200]]
    said = " ".join(x for x in named if not x.startswith("Classifier") and ("License" in x or "::" not in x))
    found = PERMISSIVE.search(said)
    return found[0] if found and not COPYLEFT.search(said) else None


def functions(package: Distribution, rng: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """(name, signature, first paragraph of the docstring, code) of functions of it, about ENOUGH."""
    found = 0
    files = list(package.files or ())
    rng.shuffle(files)
    for file in files:
        if file.suffix != ".py" or "test" in str(file).lower():
            continue
        if found > ENOUGH:
            return
        try:
            source = Path(str(file.locate())).read_text(encoding="utf-8")
            tree, lines = ast.parse(source), source.split("\n")
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if 80 < len(code) <= LONGEST:
                    found += 1
                    yield node.name, code.split(":\n")[0] + ":", doc, code


def paragraphs(package: Distribution) -> Iterator[str]:
    """Passages of prose from its README."""
    text = package.metadata.get_payload()
    for part in re.split(r"\n#+ |\n={4,}|\n-{4,}", text if isinstance(text, str) else ""):
        prose = re.sub(r"\[!?\[.*?\]\(.*?\)\]?|<[^>]+>", "", part).strip()
        letters = sum(c.isalpha() or c == " " for c in prose)
        if len(prose) > 300 and letters > 0.75 * len(prose):
            yield prose[:LONGEST]


def collect(rng: random.Random, gsm8k: Path | None, most: int) -> tuple[list[str], Counter[tuple[str, str]]]:
    """Prompts, and how many come of each (source, licence). most: prompts of one package at most."""
    prompts: list[str] = []
    sources: Counter[tuple[str, str]] = Counter()
    for package in sorted(distributions(), key=lambda d: d.metadata["Name"].lower()):
        under = licence(package)
        if not under or package.metadata["Name"] == "slipstream":
            continue
        made = []
        for name, signature, doc, code in functions(package, rng):
            if 30 < len(doc) < 400:
                made.append(rng.choice(FROM_DOCSTRING).format(name=name, doc=doc, signature=signature))
            if rng.random() < 0.4:
                made.append(rng.choice(FROM_CODE).format(code=code))
        for text in paragraphs(package):
            made += [ask.format(text=text) for ask in rng.sample(FROM_TEXT, 2)]
        chosen = rng.sample(made, min(most, len(made)))
        prompts += chosen
        sources[package.metadata["Name"], under] += len(chosen)
    asked = [ask.format(topic=t, other=rng.choice(TOPICS)) for ask in TASKS for t in TOPICS]
    prompts += asked
    sources["templates of this script", "the project's"] += len(asked)
    if gsm8k:
        for line in gsm8k.read_text(encoding="utf-8").splitlines():
            prompts.append(rng.choice(FROM_QUESTION).format(question=json.loads(line)["question"]))
            sources["GSM8K, training questions", "MIT"] += 1
    unique = sorted(set(prompts))
    rng.shuffle(unique)
    return unique, sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, help="its train.jsonl")
    parser.add_argument("--most", type=int, default=800, help="prompts of one package")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts, sources = collect(random.Random(args.seed), args.gsm8k, args.most)
    args.out.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    told = [{"source": s, "licence": under, "prompts": n} for (s, under), n in sources.most_common() if n]
    args.out.with_suffix(".sources.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"{len(prompts)} prompts of {len(told)} sources", file=sys.stderr)


if __name__ == "__main__":
    main()
