"""Tasks on single numbers, measures and dates."""

from __future__ import annotations

import math
from functools import partial

from prompts.draws import one_of, point, reals, whole
from prompts.task import task

_DIGITS = partial(whole, low=10, high=9999)
_SIDE = partial(whole, low=3, high=5)  # any three of these make a triangle


@task(
    "Return the least common multiple of two positive integers.",
    "Compute the smallest number that both a and b divide.",
    also="lcm",
    a=whole,
    b=whole,
)
def least_common_multiple(a: int, b: int) -> int:
    return math.lcm(a, b)


@task(
    "Return the Fibonacci number F(n), where F(0) = 0 and F(1) = 1.",
    also="fibonacci_at",
    n=partial(whole, low=1, high=15),
)
def nth_fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


@task(
    "Return True if n is a prime number and False otherwise.",
    "Check if the given number is prime.",
    also="prime_test",
    n=partial(whole, low=1, high=60),
)
def check_prime_number(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1))


@task(
    "Return the sum of the decimal digits of a non-negative integer.", also="add_digits", n=_DIGITS
)
def digits_total(n: int) -> int:
    return sum(map(int, str(n)))


@task(
    "Return the integer whose digits are those of n in reverse order.",
    also="mirror_integer",
    n=_DIGITS,
)
def reverse_number(n: int) -> int:
    return int(str(n)[::-1])


@task(
    "Convert the number to its binary representation, without a prefix.",
    also="binary_string",
    n=partial(whole, low=1, high=99),
)
def to_binary(n: int) -> str:
    return f"{n:b}"


@task(
    "Return the factorial of n.",
    "Compute the product of all integers from 1 to n.",
    also="compute_factorial",
    n=partial(whole, low=0, high=9),
)
def factorial_of(n: int) -> int:
    return math.factorial(n)


@task(
    "Return the list of all positive divisors of n in ascending order.",
    also="all_divisors",
    n=partial(whole, low=4, high=40),
)
def divisors_of(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


@task("Check whether n is a power of two.", also="power_of_two", n=partial(whole, low=1, high=70))
def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@task(
    "Count the steps until n becomes 1, when even numbers are halved and odd numbers are tripled "
    "and increased by one.",
    also="steps_to_one",
    n=partial(whole, low=2, high=20),
)
def collatz_steps(n: int) -> int:
    steps = 0
    while n != 1:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
    return steps


@task(
    "Return the numbers from 1 to n as strings, but 'Fizz' for multiples of 3, 'Buzz' for "
    "multiples of 5 and 'FizzBuzz' for multiples of both.",
    also="fizz_list",
    n=partial(whole, low=3, high=7),
)
def fizz_buzz(n: int) -> list[str]:
    return [
        ("Fizz" if i % 3 == 0 else "") + ("Buzz" if i % 5 == 0 else "") or str(i)
        for i in range(1, n + 1)
    ]


@task(
    "A number is perfect when it equals the sum of its divisors smaller than itself. Check if n "
    "is perfect.",
    also="is_perfect",
    n=partial(one_of, options=(6, 28, 12, 10, 8)),
)
def perfect_number(n: int) -> bool:
    return n > 1 and sum(i for i in range(1, n) if n % i == 0) == n


@task(
    "Return the value, but not less than low and not more than high.",
    also="limit_value",
    value=partial(whole, low=-9),
    low=partial(whole, low=0, high=5),
    high=partial(whole, low=10, high=20),
)
def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


@task(
    "Return True if the year is a leap year.",
    also="is_leap",
    year=partial(whole, low=1890, high=2030),
)
def leap_year(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@task(
    "Format a number of seconds as minutes and seconds, such as 2:05.",
    also="format_seconds",
    seconds=partial(whole, low=5, high=900),
)
def seconds_to_time(seconds: int) -> str:
    return f"{seconds // 60}:{seconds % 60:02d}"


@task(
    "Convert a temperature from degrees Celsius to degrees Fahrenheit.",
    also="convert_temperature",
    celsius=partial(whole, low=-10, high=40),
)
def celsius_to_fahrenheit(celsius: float) -> float:
    return round(celsius * 9 / 5 + 32, 2)


@task(
    "Return the area of a rectangle with the given sides.",
    also="area_of_rectangle",
    width=whole,
    height=whole,
)
def rectangle_area(width: float, height: float) -> float:
    return width * height


@task(
    "Return the area of a circle, rounded to two decimal places.",
    also="area_of_circle",
    radius=partial(whole, low=1, high=12),
)
def circle_area(radius: float) -> float:
    return round(math.pi * radius**2, 2)


@task(
    "Return the length of the hypotenuse of a right triangle with legs a and b, rounded to 2 "
    "decimals.",
    also="longest_side",
    a=whole,
    b=whole,
)
def hypotenuse(a: float, b: float) -> float:
    return round(math.hypot(a, b), 2)


@task(
    "Return 'equilateral', 'isosceles' or 'scalene' for the sides of a triangle.",
    also="classify_triangle",
    a=_SIDE,
    b=_SIDE,
    c=_SIDE,
)
def triangle_kind(a: int, b: int, c: int) -> str:
    return ("equilateral", "isosceles", "scalene")[len({a, b, c}) - 1]


@task("Return the Manhattan distance between two points.", also="grid_distance", p=point, q=point)
def manhattan_distance(p: tuple[int, int], q: tuple[int, int]) -> int:
    return abs(p[0] - q[0]) + abs(p[1] - q[1])


@task(
    "Return the sum of the prices, increased by the tax rate in percent, rounded to 2 decimals.",
    also="total_price",
    prices=reals,
    tax=partial(one_of, options=(5, 7, 10, 20)),
)
def price_with_tax(prices: list[float], tax: float) -> float:
    return round(sum(prices) * (1 + tax / 100), 2)
