"""Tasks on lists of numbers."""

from __future__ import annotations

import math
import statistics
from functools import partial
from itertools import accumulate, pairwise

from prompts.draws import (
    integers,
    lists_of_integers,
    multiples,
    positive_or_any_integers,
    reals,
    sorted_integers,
    whole,
)
from prompts.task import task

_SMALL = partial(integers, shortest=4, longest=7, low=1, high=9)


@task(
    "Count how many numbers in the given list are greater than zero.",
    "Return the number of positive elements of the list.",
    also="how_many_positive",
    numbers=integers,
)
def count_positive(numbers: list[int]) -> int:
    return sum(number > 0 for number in numbers)


@task(
    "Return the second largest distinct number of the list.",
    "Find the second biggest element. Return None if there is no such element.",
    also="runner_up",
    numbers=integers,
)
def second_largest(numbers: list[int]) -> int | None:
    distinct = sorted(set(numbers))
    return distinct[-2] if len(distinct) > 1 else None


@task(
    "Keep only the even numbers, in their original order.",
    "Given a list of integers, return a new list with just the even ones.",
    also="filter_even",
    numbers=integers,
)
def only_even(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number % 2 == 0]


@task(
    "Return the product of all odd numbers of the list, or 1 if there are none.",
    also="product_of_odds",
    numbers=partial(integers, shortest=3, longest=5),
)
def odd_product(numbers: list[int]) -> int:
    return math.prod(number for number in numbers if number % 2)


@task(
    "Return the greatest common divisor of all numbers in the list.",
    also="common_divisor",
    numbers=multiples,
)
def gcd_of_list(numbers: list[int]) -> int:
    return math.gcd(*numbers)


@task(
    "Return the arithmetic mean of the values, rounded to 2 decimals.",
    "Given a list of numbers, return their average, rounded to 2 decimals.",
    also="average",
    values=reals,
)
def mean_value(values: list[float]) -> float:
    return round(sum(values) / len(values), 2)


@task(
    "Return the difference between the largest and the smallest value, rounded to 2 decimals.",
    also="spread",
    values=reals,
)
def value_range(values: list[float]) -> float:
    return round(max(values) - min(values), 2)


@task("Return the median of the numbers.", also="median_of", numbers=integers)
def middle_value(numbers: list[int]) -> float:
    return statistics.median(numbers)


@task(
    "Merge two sorted lists into one sorted list.",
    also="combine_sorted_lists",
    a=sorted_integers,
    b=sorted_integers,
)
def merge_sorted(a: list[int], b: list[int]) -> list[int]:
    return sorted(a + b)


@task(
    "Return the elements of a that are not in b, in their order.",
    also="missing_from",
    a=_SMALL,
    b=_SMALL,
)
def difference_of_lists(a: list[int], b: list[int]) -> list[int]:
    return [number for number in a if number not in b]


@task(
    "Remove repeated numbers and keep the first of each.",
    "Return the list without duplicates, preserving order.",
    also="distinct",
    numbers=partial(integers, shortest=4, longest=8, low=1, high=6),
)
def without_duplicates(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


@task(
    "Return the number that appears most often. If there is a tie, return the smallest.",
    also="mode_of",
    numbers=partial(integers, shortest=4, longest=8, low=1, high=5),
)
def most_common(numbers: list[int]) -> int:
    return max(sorted(set(numbers)), key=numbers.count)


@task(
    "Return the list of cumulative sums.",
    "For every position, return the sum of all numbers up to and including it.",
    also="prefix_sums",
    numbers=integers,
)
def running_total(numbers: list[int]) -> list[int]:
    return list(accumulate(numbers))


@task("Return the differences between consecutive numbers.", also="deltas", numbers=integers)
def neighbour_differences(numbers: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers)]


@task(
    "Split the list into consecutive parts of the given size; the last one may be shorter.",
    also="chunked",
    items=partial(integers, shortest=4),
    size=partial(whole, low=2, high=3),
)
def split_in_chunks(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


@task("Join a list of lists into one list.", also="join_lists", lists=lists_of_integers)
def flatten_once(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


@task(
    "Count the pairs of positions whose numbers add up to the target.",
    also="count_pairs",
    numbers=_SMALL,
    target=partial(whole, low=5, high=12),
)
def pairs_with_sum(numbers: list[int], target: int) -> int:
    return sum(a + b == target for i, a in enumerate(numbers) for b in numbers[:i])


@task(
    "Return the index of the largest number; the first one if there are several.",
    also="position_of_largest",
    numbers=integers,
)
def index_of_max(numbers: list[int]) -> int:
    return numbers.index(max(numbers))


@task(
    "Return True if all numbers of the list are positive.",
    also="every_positive",
    numbers=positive_or_any_integers,
)
def all_positive(numbers: list[int]) -> bool:
    return all(number > 0 for number in numbers)


@task(
    "Multiply every number by the factor.",
    also="scale",
    numbers=integers,
    factor=partial(whole, low=2, high=5),
)
def multiply_by(numbers: list[int], factor: int) -> list[int]:
    return [number * factor for number in numbers]


@task(
    "Return every second element, starting with the first.",
    also="skip_items",
    items=partial(integers, shortest=4, longest=8),
)
def every_second(items: list[int]) -> list[int]:
    return items[::2]


@task(
    "Return the numbers that are greater than the average of the list.",
    also="bigger_than_mean",
    numbers=integers,
)
def above_average(numbers: list[int]) -> list[int]:
    average = sum(numbers) / len(numbers)
    return [number for number in numbers if number > average]


@task(
    "Count the numbers between low and high, both included.",
    also="how_many_between",
    numbers=integers,
    low=partial(whole, low=0, high=3),
    high=partial(whole, low=6, high=12),
)
def count_in_range(numbers: list[int], low: int, high: int) -> int:
    return sum(low <= number <= high for number in numbers)


@task(
    "Move all zeros to the end of the list and keep the order of the others.",
    also="zeros_last",
    numbers=partial(integers, shortest=4, longest=7, low=0, high=3),
)
def move_zeros(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number] + [0] * numbers.count(0)


@task(
    "Return the length of the longest run of strictly increasing neighbours.",
    also="increasing_run",
    numbers=partial(integers, shortest=4, longest=8),
)
def longest_increase(numbers: list[int]) -> int:
    run = longest = 1
    for before, after in pairwise(numbers):
        run = run + 1 if after > before else 1
        longest = max(longest, run)
    return longest
