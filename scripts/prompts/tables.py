"""Tasks on matrices and dictionaries."""

from __future__ import annotations

from functools import partial

from prompts.draws import matrix, numbered_words, scores, whole
from prompts.task import task


@task(
    "Return the transpose of the matrix.",
    "Swap rows and columns of a matrix given as a list of rows.",
    also="flip_matrix",
    matrix=partial(matrix, columns=2),
)
def transpose(matrix: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*matrix, strict=True)]


@task("Return the sum of the main diagonal of a square matrix.", also="trace", matrix=matrix)
def diagonal_sum(matrix: list[list[int]]) -> int:
    return sum(row[i] for i, row in enumerate(matrix))


@task("Return the largest number of every row.", also="max_of_rows", matrix=matrix)
def row_maxima(matrix: list[list[int]]) -> list[int]:
    return [max(row) for row in matrix]


@task("Return a dictionary with keys and values exchanged.", also="swap_keys", table=numbered_words)
def invert_dictionary(table: dict[str, int]) -> dict[int, str]:
    return {value: key for key, value in table.items()}


@task("Return the key with the largest value.", also="best_key", scores=scores)
def largest_value_key(scores: dict[str, int]) -> str:
    return max(scores, key=scores.__getitem__)


@task(
    "Return the sorted names whose score is at least the limit.",
    also="passing",
    scores=scores,
    limit=partial(whole, low=5, high=20),
)
def filter_by_score(scores: dict[str, int], limit: int) -> list[str]:
    return sorted(name for name, score in scores.items() if score >= limit)
