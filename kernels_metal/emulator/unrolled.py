"""Which loops index arrays in registers, and have to be unrolled.

Registers have no addresses: an array that a loop indexes at run time lies in memory, ten times as
slow. Apple's compiler unrolls by itself what it finds small enough, so the pragma has to ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kernels_metal.emulator.text import matching, split_outside

_UNROLLED = re.compile(r"#pragma clang loop unroll\(full\)\s*\Z")
_LOOP = re.compile(r"\b(?:for|while)\s*\(")
_COUNTED = re.compile(r"\bfor\s*\(\s*\w+\s+(\w+)\s*=")
_CHANGED = re.compile(r"(?:\+\+|--)\s*(\w+)|\b(\w+)\s*(?:\+\+|--|(?:[-+*/%|&^]|<<|>>)=)")
_SET = re.compile(r"\b(\w+)\s*=(?!=)([^;]*)")
_ELSEWHERE = re.compile(r"\b(?:device|threadgroup|constant)\b")


def rolled_loops(source: str, types: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Position and array of every loop that indexes one and is not asked to be unrolled.

    source: without comments. types: the names of all types.
    """
    arrays = _arrays(source, types)
    for loop in _LOOP.finditer(source):
        if _UNROLLED.search(source[: loop.start()]):
            continue
        inside = matching(source, loop.end() - 1)
        body = source[inside : _end(source, inside)]
        moving = _moving({*_COUNTED.findall(source[loop.start() : inside])}, body)
        for array in arrays:
            if any(moving & _names(index) for index in _indices(body, array)):
                yield loop.start(), array


def _moving(counters: set[str], body: str) -> set[str]:
    """What differs from one turn of a loop to the next: counters, and what is made of these."""
    moving = {name for pair in _CHANGED.findall(body) for name in pair if name}
    moving = moving - {*_COUNTED.findall(body)} | counters  # loops inside begin anew in every turn
    for name, value in _SET.findall(body):
        moving |= {name} if moving & _names(value) else set()
    return moving


def _names(text: str) -> set[str]:
    return {*re.findall(r"\w+", text)}


def _arrays(source: str, types: Sequence[str]) -> list[str]:
    """Names of arrays in registers, and of pointers to them."""
    kind = rf"\b(?:vec|{'|'.join(types)})\b(?:\s*<[^<>;(){{}}]*>)?"
    found = []
    for match in re.finditer(rf"{kind}\s+(?=\w)", source):
        before = re.split(r"[;{}(,]", source[: match.start()])[-1]
        if not _ELSEWHERE.search(before):
            statement = re.split(r"[;{]", source[match.end() :], maxsplit=1)[0]
            named = (re.match(r"\s*(\w+)\s*\[", part) for part in split_outside(statement))
            found += [name[1] for name in named if name]
    found += re.findall(rf"\bthread\s+(?:const\s+)?{kind}\s*\*\s*(\w+)", source)
    found += re.findall(rf"\bthread\s+(?:const\s+)?{kind}\s*\(\s*&\s*(\w+)\s*\)\s*\[", source)
    return sorted({*found})


def _end(source: str, start: int) -> int:
    """Where the statement that begins at `start` ends."""
    opening = start + len(source[start:]) - len(source[start:].lstrip())
    if source[opening : opening + 1] == "{":
        return matching(source, opening)
    while opening < len(source) and source[opening] != ";":
        opening = matching(source, opening) if source[opening] in "({[" else opening + 1
    return opening


def _indices(body: str, array: str) -> Iterator[str]:
    for match in re.finditer(rf"(?<![\w.])(?:{array})\s*\[", body):
        yield body[match.end() : matching(body, match.end() - 1) - 1]
