"""Builds the prompts that the demo model's draft heads are trained on: questions only, answers are the target's own.

    python -m backends.reference.training.prompts GSM8K_TRAIN.jsonl SELF_INSTRUCT.jsonl > prompts.jsonl

GSM8K_TRAIN: training questions of openai/grade-school-math (MIT). SELF_INSTRUCT: seed tasks and user-oriented instructions of
yizhongw/self-instruct (Apache-2.0). Code and documentation come from the Python standard library of the running interpreter,
chat from templates over topics. None of it is in a bundled trace or pool: those are MT-bench, HumanEval and GSM8K *test*.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

SEED = 0
MATH, CHAT, TEXTS = 1100, 1000, 500
MODULES = (
    "argparse ast base64 bisect calendar cgitb cmd code codecs collections colorsys configparser contextlib copy csv dataclasses "
    "datetime difflib dis doctest email.utils enum filecmp fileinput fnmatch fractions ftplib functools getopt getpass gettext "
    "glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies http.server imaplib importlib.util inspect "
    "ipaddress json.decoder json.encoder keyword linecache locale logging lzma mailbox mimetypes netrc numbers operator optparse "
    "os pathlib pdb pickletools pkgutil plistlib poplib posixpath pprint profile pstats queue quopri random re reprlib sched "
    "secrets shelve shlex shutil smtplib socketserver ssl stat statistics string stringprep subprocess symtable tabnanny tarfile "
    "tempfile textwrap threading timeit token tokenize trace traceback tracemalloc turtle types typing unittest.case urllib.parse "
    "urllib.request uuid venv warnings wave weakref webbrowser xml.dom.minidom xml.sax.saxutils xmlrpc.client zipapp zipfile"
)
CODE = (
    "Explain step by step what this Python function does.\n\n```python\n{code}\n```",
    "Write a docstring for this Python function and show the function with it.\n\n```python\n{code}\n```",
    "Write three unit tests with pytest for this function.\n\n```python\n{code}\n```",
    "Rewrite this Python function with type hints and clearer variable names.\n\n```python\n{code}\n```",
    "Write a Python function named `{name}` for this description: {summary}",
    "I need a Python function `{name}({arguments})`. {summary} Show the code and one example of its use.",
    "How would you write `{name}` in Python without any library? {summary}",
)
GROUNDED = (
    "Put a short comment before each line of this function and print the result.\n\n```python\n{code}\n```",
    "Replace the name `{name}` by `new_{name}` in the code below and show the whole code.\n\n```python\n{code}\n```",
    "Repeat the following text, with every sentence on its own line.\n\n{text}",
    "Summarize the following documentation in two sentences.\n\n{text}",
    "Rewrite the following text so that a beginner understands it.\n\n{text}",
    "List the key points of this text as bullet points.\n\n{text}",
    "Answer from the text only: what is it about, and what should the reader do?\n\n{text}",
)
TALK = (
    "What is {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "What are the main advantages and disadvantages of {topic}?",
    "Give me five tips about {topic}.",
    "Write an email to a colleague about {topic}.",
    "I am interested in {topic}. Where should I start?",
    "Describe the history of {topic}.",
    "Why does {topic} matter today?",
    "Write a blog post introduction about {topic}.",
    "Create an outline for a talk about {topic}.",
    "List ten facts about {topic}.",
    "Compare {topic} with {other}.",
    "What do people often get wrong about {topic}?",
    "Write a dialogue between two friends who disagree about {topic}.",
    "Imagine you are an expert in {topic}. How would you answer a sceptic?",
    "Plan a weekend around {topic}.",
    "Give a definition of {topic} and two examples.",
    "How will {topic} change in the next twenty years?",
    "Write a product description that has to do with {topic}.",
    "Write a quiz with four questions about {topic} and give the answers.",
    "What would a world without {topic} look like?",
    "Summarize what you know about {topic} in one paragraph.",
    "Is {topic} the same as {other}? Explain the difference.",
    "Write step-by-step instructions for someone who wants to try {topic}.",
)
TOPICS = (
    "photosynthesis;the French Revolution;beekeeping;black holes;baking bread;electric cars;the stock market;learning to play the "
    "guitar;climate change;the Roman Empire;chess;online privacy;volcanoes;time management;the immune system;growing tomatoes;"
    "machine learning;jazz;public libraries;marathon running;the water cycle;job interviews;solar panels;Shakespeare;earthquakes;"
    "meditation;remote work;the human heart;tea;board games;vaccines;saving money;coral reefs;the printing press;bicycle repair;"
    "dinosaurs;renting a flat;supply and demand;the moon landing;vegetarian cooking;sleep;the Silk Road;team meetings;rainforests;"
    "gravity;folk tales;house plants;nuclear power;learning a language;democracy;coffee;artificial intelligence;penguins;"
    "photography;inflation;the Great Wall of China;yoga;tides;customer service;detective stories;antibiotics;city traffic;origami;"
    "the Renaissance;mountain hiking;computer networks;honesty;recycling;dogs;the periodic table;public speaking;wind turbines;"
    "the Olympic Games;migration of birds;databases;friendship;knitting;the planet Mars;first aid;movie reviews;tax returns;"
    "desert animals;insurance;the invention of the telephone;swimming;fashion;genetics;school uniforms;lighthouses;robots;"
    "the metric system;street food;whales;volunteering;probability;castles;the brain;social media;ice cream;trade unions;"
    "cloud computing;maps;allergies;theatre;steam engines;astronomy;pottery;habits;weather forecasts;opera;submarines"
)


def main(gsm8k: str, self_instruct: str) -> None:
    rng = random.Random(SEED)
    rows = [{"prompt": row["prompt"], "category": "math"} for row in _read(gsm8k)[:MATH]]
    rows += [{"prompt": row["prompt"], "category": "instruction"} for row in _read(self_instruct)]
    rows += _chat(rng)
    rows += _library(rng)
    seen: set[str] = set()
    rows = [row for row in rows if not (row["prompt"] in seen or seen.add(row["prompt"]))]  # type: ignore[func-returns-value]
    rng.shuffle(rows)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))


def _read(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def _chat(rng: random.Random) -> list[dict[str, str]]:
    topics = TOPICS.split(";")
    pairs = [(template, topic) for template in TALK for topic in topics]
    picked = rng.sample(pairs, CHAT)
    return [
        {"prompt": template.format(topic=topic, other=rng.choice(topics)), "category": "chat"} for template, topic in picked
    ]


def _library(rng: random.Random) -> list[dict[str, str]]:
    """One code task for each short documented function, and a grounded task for every second and for each module's text."""
    rows = []
    functions = sorted(set(_functions()))
    rng.shuffle(functions)
    for i, (name, arguments, code, summary) in enumerate(functions):
        fields = {"name": name, "arguments": arguments, "code": code, "summary": summary}
        rows.append({"prompt": CODE[i % len(CODE)].format(**fields), "category": "code"})
        if i % 3 == 0:
            rows.append({"prompt": GROUNDED[i // 3 % 2].format(**fields), "category": "grounded"})
    texts = sorted(set(_documentation()))
    for i, text in enumerate(rng.sample(texts, min(TEXTS, len(texts)))):
        rows.append({"prompt": GROUNDED[2 + i % (len(GROUNDED) - 2)].format(text=text), "category": "grounded"})
    return rows


def _members() -> Iterator[object]:
    for name in MODULES.split():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        yield module
        for member in vars(module).values():
            if getattr(member, "__module__", None) != name or not (inspect.isclass(member) or inspect.isfunction(member)):
                continue
            yield member
            if inspect.isclass(member):
                yield from (method for method in vars(member).values() if inspect.isfunction(method))


def _functions() -> Iterator[tuple[str, str, str, str]]:
    """Name, arguments, source and first line of documentation."""
    for member in _members():
        if not inspect.isfunction(member) or not member.__doc__ or member.__name__.startswith("__"):
            continue
        try:
            code = textwrap.dedent(inspect.getsource(member)).rstrip()
        except (OSError, TypeError):
            continue
        lines = code.splitlines()
        summary = inspect.cleandoc(member.__doc__).split("\n\n")[0].replace("\n", " ").strip()
        if not (4 <= len(lines) <= 22 and len(code) <= 650 and code.startswith("def ") and 20 <= len(summary) <= 200):
            continue
        arguments = ", ".join(p for p in inspect.signature(member).parameters if p not in ("self", "cls"))
        yield member.__name__, arguments, code, summary.rstrip(".") + "."


def _documentation() -> Iterator[str]:
    """Paragraphs of prose out of docstrings."""
    for member in _members():
        for paragraph in (inspect.getdoc(member) or "").split("\n\n"):
            text = " ".join(paragraph.split())
            if 180 <= len(text) <= 600 and ">>>" not in text and text[0].isupper() and text.endswith("."):
                yield text


if __name__ == "__main__":
    main(*sys.argv[1:])
