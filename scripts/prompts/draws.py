"""Random arguments for the reference functions; every draw is one of the `Random` given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

_Option = TypeVar("_Option")

Draw = Callable[[Random], Any]

_WORDS = """
apple banana river stone cloud tiger yellow python garden winter music orange kite lemon paper
rocket silver window zebra market island bridge candle dragon echo forest hello world data table
queen level radar noon civic
"""
WORDS = tuple(_WORDS.split())
PALINDROMES_AND_OTHERS = WORDS[-6:] + WORDS[:6]


def one_of(random: Random, options: Sequence[_Option]) -> _Option:
    """Any of `options`."""
    return random.choice(options)


def whole(random: Random, low: int = 1, high: int = 30) -> int:
    """A whole number from `low` to `high`, both included."""
    return random.randint(low, high)


def integers(
    random: Random, shortest: int = 3, longest: int = 7, low: int = -9, high: int = 20
) -> list[int]:
    """`shortest` to `longest` numbers from `low` to `high`."""
    return [random.randint(low, high) for _ in range(random.randint(shortest, longest))]


def sorted_integers(random: Random) -> list[int]:
    """Two to four numbers in ascending order."""
    return sorted(integers(random, 2, 4))


def positive_or_any_integers(random: Random) -> list[int]:
    """Numbers of which, half of the time, none is negative."""
    return integers(random, low=random.choice([1, -9]))


def multiples(random: Random) -> list[int]:
    """Small numbers that have a good chance of a common divisor."""
    return [number * random.choice([2, 3, 5]) for number in integers(random, 2, 4, 1, 9)]


def lists_of_integers(random: Random) -> list[list[int]]:
    """Three short lists."""
    return [integers(random, 1, 3) for _ in range(3)]


def reals(random: Random) -> list[float]:
    """Three to six numbers from 0 to 10 with one decimal."""
    return [round(random.uniform(0, 10), 1) for _ in range(random.randint(3, 6))]


def point(random: Random) -> tuple[int, int]:
    """Two coordinates."""
    return whole(random), whole(random)


def matrix(random: Random, rows: int = 3, columns: int = 3) -> list[list[int]]:
    """Rows of digits."""
    return [[random.randint(0, 9) for _ in range(columns)] for _ in range(rows)]


def word(random: Random) -> str:
    """One of WORDS."""
    return random.choice(WORDS)


def words(random: Random) -> list[str]:
    """Two to five of WORDS, perhaps the same twice."""
    return [word(random) for _ in range(random.randint(2, 5))]


def sentence(random: Random) -> str:
    """One to four words with spaces between."""
    return " ".join(word(random) for _ in range(random.randint(1, 4)))


def snake_case_name(random: Random) -> str:
    """Two or three words joined by underscores."""
    return "_".join(words(random)[:3])


def letter_runs(random: Random) -> str:
    """Four letters or fewer, each up to three times in a row."""
    return "".join(letter * random.randint(1, 3) for letter in word(random)[:4])


def word_with_number(random: Random) -> str:
    """A number of one or two digits between two words."""
    return f"{word(random)}{random.randint(1, 99)}{word(random)}"


def words_with_prefix(random: Random) -> list[str]:
    """Words that begin alike, or with nothing in common."""
    prefix = random.choice(["pre", "un", "", "re"])
    return [prefix + each for each in words(random)]


def numbered_words(random: Random) -> dict[str, int]:
    """Different words with their places; the dictionary's order does not depend on hashes."""
    return {each: i for i, each in enumerate(dict.fromkeys(words(random)))}


def scores(random: Random) -> dict[str, int]:
    """Numbers by word."""
    return {each: whole(random) for each in dict.fromkeys(words(random))}
