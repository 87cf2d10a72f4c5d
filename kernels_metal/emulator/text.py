"""Reading Metal source as text: comments, vector types, declarations."""

from __future__ import annotations

import re
from collections.abc import Iterator

NUMBERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
FLOATS = ("half", "bfloat", "float")
SIZED = tuple(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64))
SCALARS = ("bool", "size_t", "float16_t", "bfloat16_t", *NUMBERS, *FLOATS, *SIZED)
VECTORS = tuple(f"{scalar}{n}" for scalar in (*NUMBERS, *FLOATS) for n in (2, 3, 4))

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL)
_NAMESPACE = re.compile(r"\bnamespace\b[^{};=()]*\{")
_FUNCTION = re.compile(r"\)\s*(?:const\s*)?\{\}$")
_ALIAS = re.compile(
    r"\busing\s+(\w+)\s*=\s*(?:metal::)?vec\s*<|\btypedef\s+(?:metal::)?vec\s*<[^;]*>\s*(\w+)\s*;"
)


def without_comments(source: str) -> str:
    """The same text with comments and string literals blank; every position and line stays."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)


def line_at(source: str, position: int) -> int:
    """The line of a position, from 1."""
    return source.count("\n", 0, position) + 1


def vector_aliases(source: str) -> list[str]:
    """Names that the source gives to `vec<...>`."""
    return [m[1] or m[2] for m in _ALIAS.finditer(source)]


def split_outside(text: str, separator: str = ",") -> list[str]:
    """The parts between separators that stand in no bracket."""
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == separator and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [*parts, current]


def matching(text: str, opening: int) -> int:
    """The position after the bracket that closes the one at `opening`; the end if none does."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return position + 1
    return len(text)


def outermost_statements(source: str) -> Iterator[tuple[int, str]]:
    """Position and text of what stands in no brace but a namespace's; what braces hold is left out.

    source: without comments.
    """
    source = _DIRECTIVE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
    while opening := _NAMESPACE.search(source):
        end = matching(source, opening.end() - 1)
        inside = source[opening.end() : end - 1]
        source = f"{source[: opening.start()]}{' ' * len(opening[0])}{inside} {source[end:]}"
    start, depth, text = 0, 0, ""
    for at, letter in enumerate(source):
        depth -= letter == "}"
        text += letter if depth == 0 else ""
        depth += letter == "{"
        if depth == 0 and (letter == ";" or (letter == "}" and _FUNCTION.search(text))):
            yield start + len(text) - len(text.lstrip()), text.strip()
            start, text = at + 1, ""


def threadgroup_declarations(source: str) -> Iterator[re.Match[str]]:
    """Statements that begin with `threadgroup`: variables, and pointers to such memory."""
    return re.finditer(r"(?:(?<=[;{}])|^)\s*\b(threadgroup\b[^;{}]*);", source, re.MULTILINE)
