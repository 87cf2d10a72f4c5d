"""Programming tasks written as benchmarks write them: a function's head and documentation."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from random import Random

from prompts import lists, numbers, tables, texts
from prompts.task import Task

SENTENCE = "Write a solution to the following problem and make sure that it passes the tests:"
TASKS: tuple[Task, ...] = tuple(
    value
    for module in (lists, numbers, tables, texts)
    for value in vars(module).values()
    if isinstance(value, Task)
)

_QUOTES = ('"""', '"""', "'''")
_LEAD_INS = (
    "Write a function that does the following. ",
    "You are given the arguments below. ",
    "Complete this function. ",
    "Create a function for this task: ",
)
_ARGUMENTS = "x|s|n|lst|arr|text|numbers|string|a, b|data|values|words|x, y|nums, k|items"
_SAY_NOTHING = """
a an the to of in that which from and or for with given write create generate design develop
implement build construct python function program code script method using use is are be as by on
it its this into your you two one all can will should please following
"""
_BREAKS_A_DOCSTRING = re.compile(r"\\|\"\"\"|'''|```")
_LONGEST_INSTRUCTION = 400  # characters


def function_prompt(random: Random, tasks: Sequence[Task] = TASKS) -> str:
    """One of `tasks` with a random name, wording, layout and computed examples."""
    task = random.choice(tasks)
    name = random.choice(task.names)
    typed = random.random() < 0.5
    examples = dict(task.example(random) for _ in range(random.randint(1, 4)))
    quote = random.choice(_QUOTES)
    space = random.choice(("", "", " "))
    description = random.choice(task.descriptions)
    if random.random() < 0.25:
        description = random.choice(_LEAD_INS) + description
    lines = [
        task.signature(name, typed),
        f"    {quote}{space}{_wrap(description, 72)}",
        *(f"    {line}".rstrip() for line in _example_lines(random, name, examples)),
        f"    {quote}",
    ]
    imports = task.imports() if typed else ()
    head = f"from typing import {', '.join(imports)}\n\n" if imports else ""
    return _fenced(head + "\n" + "\n".join(lines))


def wrapped_prompt(instruction: str) -> str | None:
    """An instruction as the documentation of a function; the same for the same instruction.

    The function is named after its first words. None where there are too few of them, or where
    the instruction holds what would end the documentation.
    """
    random = Random(instruction)
    text = textwrap.shorten(instruction, _LONGEST_INSTRUCTION, placeholder="")
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 2]
    words = [word for word in words if word not in _SAY_NOTHING.split()]
    if len(words) < 2 or _BREAKS_A_DOCSTRING.search(text):
        return None
    name = "_".join(words[: random.randint(2, 3)])
    arguments = random.choice(_ARGUMENTS.split("|"))
    quote = random.choice(_QUOTES)
    begin = random.choice(("", " ", "\n    "))
    return _fenced(f"\ndef {name}({arguments}):\n    {quote}{begin}{_wrap(text, 76)}\n    {quote}")


def _example_lines(random: Random, name: str, examples: dict[str, str]) -> list[str]:
    """The calls and their results in one of four layouts."""
    calls = [(f"{name}({arguments})", result) for arguments, result in examples.items()]
    layout = random.choice(("doctest", "equation", "table", "sentence"))
    if layout == "doctest":
        return [line for call, result in calls for line in (f">>> {call}", result)]
    if layout == "equation":
        title = random.choice(("For example:", "Example:", "Examples:"))
        sign = random.choice(("==", "=>", "->"))
        return [title, *(f"{call} {sign} {result}" for call, result in calls)]
    if layout == "table":
        return ["", "Examples", *(f"{call} ➞ {result}" for call, result in calls)]
    return [f"{call} returns {result}" for call, result in calls]


def _wrap(text: str, width: int) -> str:
    return "\n    ".join(textwrap.wrap(text, width))


def _fenced(code: str) -> str:
    return f"{SENTENCE}\n```python\n{code}\n```"
