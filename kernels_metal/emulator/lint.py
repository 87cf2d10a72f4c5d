"""What Apple's compiler refuses though clang takes it, and what the emulator would get wrong."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from kernels_metal.emulator.errors import EmulatorError
from kernels_metal.emulator.text import (
    SCALARS,
    VECTORS,
    line_at,
    matching,
    outermost_statements,
    threadgroup_declarations,
    vector_aliases,
    without_comments,
)
from kernels_metal.emulator.unrolled import rolled_loops
from kernels_metal.factory import Kernel, Launch

MAX_THREADS = 1024  # of a threadgroup
SAFE_THREADS = 384  # an M2 Pro was seen to have registers for 448 of a kernel like ours

Problem = tuple[int, str]  # position in the text, what is wrong

_FORBIDDEN = {
    r"double": "Metal has no double",
    r"new|delete|malloc|free": "Metal has no dynamic memory",
    r"std(?=\s*::)": "Metal has no C++ standard library",
    r"throw|try|catch|noexcept": "Metal has no exceptions",
    r"virtual|dynamic_cast|typeid": "Metal has no run-time types",
    r"u?long[34]": "the emulator does not check accesses of 32 bytes",
    r"static(?!\s+(?:inline|constant|constexpr\s+constant)\b)": "Metal has no static variables",
    r"goto|register|thread_local|asm": "not part of Metal",
}
_SPACES = re.compile(r"\b(?:device|threadgroup|constant|thread)\b")
_TEMPLATE = re.compile(r"^template\s*<[^;{}()]*>\s*(?=\w)")
_NO_VARIABLE = re.compile(
    r"^;$|^(?:using|typedef|static_assert|namespace|friend)\b|^threadgroup\b"  # that has a check
    r"|^(?:struct|class|enum|union)\b[^{}=]*(?:\{\})?;$|\)\s*(?:const\s*)?(?:;|\{\})$"
)
_NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof"}


@dataclass(frozen=True)
class _Text:
    """Header or body of a kernel, without its comments."""

    file: str
    source: str
    is_body: bool


def check(kernel: Kernel, plan: Launch) -> None:
    """Raises EmulatorError, of kind lint with a line of the source or limit."""
    threads = prod(plan.threadgroup)
    if min(*plan.threadgroup, *plan.grid) < 1 or threads > MAX_THREADS:
        raise EmulatorError(
            "limit",
            f"grid {plan.grid} with threadgroups of {plan.threadgroup}: "
            f"1 to {MAX_THREADS} threads are possible",
            kernel.name,
        )
    if threads > SAFE_THREADS and not kernel.falls_back:
        raise EmulatorError(
            "limit",
            f"threadgroups of {threads} threads, but an M1 or M2 may have registers for no more "
            f"than {SAFE_THREADS}; who has another kernel for these says so (falls_back)",
            kernel.name,
        )
    templates = tuple(name for name, value in plan.template if not isinstance(value, int))
    header = kernel.header_path.name if kernel.header_path else ""
    texts = (
        _Text(header, without_comments(kernel.header_text), False),
        _Text(kernel.path.name, without_comments(kernel.body), True),
    )
    for text, source in zip(texts, (kernel.header_text, kernel.body), strict=True):
        for letter in re.finditer(r"[^\x00-\x7f]", source):  # MLX hands the text over as ASCII
            problem = f"{letter[0]} is not ASCII, and Metal would get no text at all"
            place = text.file, line_at(source, letter.start())
            raise EmulatorError("lint", problem, kernel.name, place)
    for file, line, problem in find_problems(texts, templates):
        raise EmulatorError("lint", problem, kernel.name, (file, line))


@functools.cache
def find_problems(
    texts: tuple[_Text, _Text], templates: tuple[str, ...]
) -> list[tuple[str, int, str]]:
    """File, line and problem, for all that the lint knows; `templates` are names of types."""
    whole = "".join(text.source for text in texts)
    types = _types(whole, templates)
    result = []
    for text in texts:
        checks = (
            _forbidden_words(text.source),
            _unqualified_pointers(text.source, types),
            _vector_casts(text.source, vector_aliases(whole)),
            _threadgroup_variables(text),
            () if text.is_body else _global_variables(text.source),
            _recursion(text.source),
            _rolled(text.source, types),
        )
        found = sorted(problem for problems in checks for problem in problems)
        result += [(text.file, line_at(text.source, at), problem) for at, problem in found]
    return result


def _types(source: str, templates: Sequence[str]) -> list[str]:
    """Names of all types: Metal's, the template's and the source's own."""
    named = re.findall(r"\b(?:struct|typename|class|using)\s+(\w+)", source)
    named += re.findall(r"\btypedef\b[^;]*?(\w+)\s*;", source)
    return sorted({*SCALARS, *VECTORS, *templates, *named, "void", "simdgroup_matrix"})


def _forbidden_words(source: str) -> Iterator[Problem]:
    for words, reason in _FORBIDDEN.items():
        for match in re.finditer(rf"\b(?:{words})(?!\w)", source):
            yield match.start(), f"{match[0]}: {reason}"
    for match in re.finditer(r"(?<![\w\])])\s*\[[&=]?\]\s*\(", source):
        yield match.start(), "lambdas are not part of Metal"


def _unqualified_pointers(source: str, types: Sequence[str]) -> Iterator[Problem]:
    pattern = rf"(?<![\w:.])(?:{'|'.join(types)})(?:\s*<[^<>;(){{}}]*>)?(?:\s+const)?\s*[*&]+\s*\w*"
    for match in re.finditer(pattern, source):
        before = re.split(r"[;{}(,<]", source[: match.start()])[-1]
        if not _SPACES.search(before):
            yield (
                match.start(),
                (
                    f"{match[0].strip()}: pointers and references need an address space: "
                    "device, threadgroup, constant or thread"
                ),
            )


def _vector_casts(source: str, aliases: Sequence[str]) -> Iterator[Problem]:
    vector = rf"(?:{'|'.join((*VECTORS, *aliases))}|(?:metal::)?vec\s*<[^<>]*>)"
    casts = rf"(?<!\w)(?<!\w\s)\(\s*{vector}\s*\)\s*[\w(]|\bstatic_cast\s*<\s*{vector}\s*>"
    for match in re.finditer(casts, source):
        yield (
            match.start(),
            f"{match[0]}: the emulator would not convert; write the type's name and ()",
        )


def _threadgroup_variables(text: _Text) -> Iterator[Problem]:
    for match in threadgroup_declarations(text.source):
        declaration, at = match[1], match.start(1)
        if re.match(r"threadgroup\b[^\[(]*[*&]", declaration):
            continue
        if "=" in re.sub(r"\[[^\]]*\]", "", declaration):
            yield at, "variables in threadgroup memory take no initial value"
        before = text.source[:at]
        if not text.is_body or before.count("{") > before.count("}"):
            yield at, "variables in threadgroup memory belong to the outermost level of a kernel"


def _global_variables(source: str) -> Iterator[Problem]:
    for at, statement in outermost_statements(source):
        declaration = _TEMPLATE.sub("", statement)
        if not _NO_VARIABLE.search(declaration) and not re.search(r"\bconstant\b", declaration):
            yield at, "variables outside functions belong to the constant address space"


def _recursion(source: str) -> Iterator[Problem]:
    calls: dict[str, set[str]] = {}
    places: dict[str, int] = {}
    for match in re.finditer(r"\b(\w+)\s*\([^;{}]*?\)\s*(?:const\s*)?\{", source):
        if match[1] not in _NOT_FUNCTIONS:
            inside = source[match.end() - 1 : matching(source, match.end() - 1)]
            places[match[1]] = match.start()
            calls.setdefault(match[1], set()).update(
                re.findall(r"\b(\w+)\s*(?:<[^;()]*>)?\(", inside)
            )
    for name, at in places.items():
        if name in _reached(name, calls):
            yield at, f"{name} calls itself; Metal has no recursion"


def _rolled(source: str, types: Sequence[str]) -> Iterator[Problem]:
    for at, array in rolled_loops(source, types):
        asked = "#pragma clang loop unroll(full)"
        yield at, f"this loop indexes {array}, an array in registers, and lacks {asked}"


def _reached(name: str, calls: dict[str, set[str]]) -> set[str]:
    """All functions that a call of `name` may call."""
    found: set[str] = set()
    ahead = list(calls[name])
    while ahead:
        next_name = ahead.pop()
        if next_name not in found:
            found.add(next_name)
            ahead += calls.get(next_name, ())
    return found
