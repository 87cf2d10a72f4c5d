"""A programming task: a reference function, what it is called, what it is asked for with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from prompts.draws import Draw

_OF_TYPING = ("Dict", "List", "Optional", "Tuple")


@dataclass(frozen=True)
class Task:
    """One task in several wordings.

    names: of the function, any of which a prompt may use. descriptions: likewise. draws: a maker
    of random arguments for every parameter, in their order.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    draws: tuple[Draw, ...]

    def example(self, random: Random) -> tuple[str, str]:
        """Random arguments as they stand between the parentheses of a call, and its result."""
        arguments = [draw(random) for draw in self.draws]
        written = ", ".join(map(repr, arguments))
        return written, repr(self.function(*arguments))

    def signature(self, name: str, typed: bool) -> str:
        """The line that begins with `def`."""
        signature = inspect.signature(self.function)
        parameters = signature.parameters.values()
        if not typed:
            return f"def {name}({', '.join(p.name for p in parameters)}):"
        arguments = ", ".join(f"{p.name}: {_as_typing(p.annotation)}" for p in parameters)
        return f"def {name}({arguments}) -> {_as_typing(signature.return_annotation)}:"

    def imports(self) -> tuple[str, ...]:
        """What the typed signature needs from `typing`."""
        typed = self.signature("", typed=True)
        return tuple(name for name in _OF_TYPING if f"{name}[" in typed)


def task(*descriptions: str, also: str, **draws: Draw) -> Callable[[Callable[..., Any]], Task]:
    """Make a task of a function.

    descriptions: wordings of what it does. also: its second name. draws: by parameter.
    """

    def decorate(function: Callable[..., Any]) -> Task:
        parameters = list(inspect.signature(function).parameters)
        if parameters != list(draws):
            raise TypeError(f"{function.__name__} takes {parameters}, drawn are {list(draws)}")
        return Task(function, (function.__name__, also), descriptions, tuple(draws.values()))

    return decorate


def _as_typing(annotation: str) -> str:
    """As Python 3.8 wrote it, and as benchmarks still do: List[int] for list[int]."""
    for kind in ("dict", "list", "tuple"):
        annotation = annotation.replace(f"{kind}[", f"{kind.capitalize()}[")
    return re.sub(r"(.+) \| None$", r"Optional[\1]", annotation)
