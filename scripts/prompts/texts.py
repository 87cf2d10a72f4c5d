"""Tasks on texts and lists of words."""

from __future__ import annotations

import os.path
from functools import partial
from itertools import groupby

from prompts.draws import (
    PALINDROMES_AND_OTHERS,
    letter_runs,
    one_of,
    sentence,
    snake_case_name,
    whole,
    word,
    word_with_number,
    words,
    words_with_prefix,
)
from prompts.task import task

_VOWELS = "aeiou"


@task(
    "Reverse the order of the words in the text.",
    "Return the sentence with its words in reverse order. Words are separated by single spaces.",
    also="flip_words",
    text=sentence,
)
def reverse_words(text: str) -> str:
    return " ".join(reversed(text.split()))


@task("Make the first letter of every word upper case.", also="capitalize_each", text=sentence)
def title_words(text: str) -> str:
    return text.title()


@task(
    "Count the vowels (a, e, i, o, u) in a string, ignoring case.",
    "Return how many vowels the text contains.",
    also="number_of_vowels",
    text=sentence,
)
def vowel_total(text: str) -> int:
    return sum(letter in _VOWELS for letter in text.lower())


@task("Return only the consonants of the word, in order.", also="strip_vowels_out", text=word)
def consonants_only(text: str) -> str:
    return "".join(letter for letter in text if letter not in _VOWELS)


@task(
    "Return a list with the length of each word.",
    "Given a list of strings, compute the length of every one of them.",
    also="lengths_of_words",
    words=words,
)
def word_lengths(words: list[str]) -> list[int]:
    return [len(word) for word in words]


@task(
    "Return a dictionary that maps every letter to the number of times it appears.",
    also="char_frequency",
    text=word,
)
def letter_counts(text: str) -> dict[str, int]:
    return {letter: text.count(letter) for letter in text}


@task(
    "Check if the text reads the same forwards and backwards.",
    also="reads_both_ways",
    text=partial(one_of, options=PALINDROMES_AND_OTHERS),
)
def is_palindromic(text: str) -> bool:
    return text == text[::-1]


@task(
    "Shift every lower case letter of the text by the given number of places in the alphabet.",
    also="shift_letters",
    text=word,
    shift=partial(whole, low=1, high=5),
)
def caesar_encode(text: str, shift: int) -> str:
    return "".join(
        chr((ord(letter) - ord("a") + shift) % 26 + ord("a")) if letter.islower() else letter
        for letter in text
    )


@task("Convert a snake_case name to camelCase.", also="to_camel", name=snake_case_name)
def snake_to_camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.title() for other in others)


@task("Return the initials of all words in upper case.", also="acronym", name=sentence)
def initials(name: str) -> str:
    return "".join(word[0].upper() for word in name.split())


@task(
    "Repeat every letter of the word the given number of times.",
    also="stretch",
    word=word,
    times=partial(whole, low=2, high=3),
)
def repeat_letters(word: str, times: int) -> str:
    return "".join(letter * times for letter in word)


@task(
    "Replace every run of equal letters by the letter and the length of the run.",
    also="run_length",
    text=letter_runs,
)
def compress_runs(text: str) -> str:
    return "".join(f"{letter}{len(list(run))}" for letter, run in groupby(text))


@task(
    "Return how many different characters the text has, regardless of case.",
    also="distinct_letters",
    text=word,
)
def unique_characters(text: str) -> int:
    return len(set(text.lower()))


@task("Return the words that begin with a vowel.", also="words_with_vowel_start", words=words)
def starts_with_vowel(words: list[str]) -> list[str]:
    return [word for word in words if word[0] in _VOWELS]


@task(
    "Sort the words by their length, and words of equal length alphabetically.",
    also="order_words",
    words=words,
)
def sort_by_length(words: list[str]) -> list[str]:
    return sorted(sorted(words), key=len)


@task("Remove all spaces from the text.", also="no_spaces", text=sentence)
def remove_spaces(text: str) -> str:
    return text.replace(" ", "")


@task(
    "Count the words in the text. Words are separated by spaces.",
    also="number_of_words",
    text=sentence,
)
def count_words(text: str) -> int:
    return len(text.split())


@task(
    "Return the longest beginning that all words share.",
    also="shared_beginning",
    words=words_with_prefix,
)
def common_prefix(words: list[str]) -> str:
    return os.path.commonprefix(words)


@task(
    "Return the digits that appear in the text as a list of integers.",
    also="digits_in",
    text=word_with_number,
)
def extract_digits(text: str) -> list[int]:
    return [int(letter) for letter in text if letter.isdigit()]
