"""MLX's text of a kernel as one C++ file for clang.

The kernel's own text stays as it is, except for three things C++ lacks: variables in threadgroup
memory become references to memory of the emulator, `vec<T, N>(...)` a function call, and `0.5`,
which C++ would round on its way into a float, `0.5f`. Lines stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

import mlx.core as mx

from kernels_metal.emulator.signature import Parameter, Signature, generate
from kernels_metal.emulator.text import (
    split_outside,
    threadgroup_declarations,
    vector_aliases,
    without_comments,
)
from kernels_metal.factory import Kernel, Launch

_UNSUFFIXED = re.compile(
    r"(?<![\w.])(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.?\d+[eE][+-]?\d+|\.\d+)(?![\w.])"
)
_TYPE = re.compile(r"threadgroup\s+((?:const\s+|volatile\s+|struct\s+)*[\w:]+\s*)(<)?")


def translate(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> str:
    """The whole C++ file; its entry point is `emulator_entry`."""
    pieces = generate(kernel, inputs, plan)
    header, body = kernel.header_text, kernel.body
    aliases = vector_aliases(without_comments(header + body))
    parts = ["#include <metal_stdlib>\n"]
    if kernel.header_path:
        parts += [_line(kernel.header_path.name), _constructors(header, aliases), "\n"]
    parts += ['#line 1 "signature"\n', pieces.head, _line(kernel.path.name)]
    parts += [_constructors(_variables(body), aliases), "\n}\n"]
    return "".join([*parts, _entry(pieces)])


def _line(name: str) -> str:
    return f'#line 1 "{name}"\n'


def _constructors(source: str, aliases: Sequence[str]) -> str:
    source = re.sub(
        r"\b(?:metal::)?vec\s*<([^<>();]*)>\s*\(", r"::emulator::make<metal::vec<\1>>(", source
    )
    source = _UNSUFFIXED.sub(r"\g<0>f", source)
    for alias in aliases:
        source = re.sub(rf"\b{alias}\s*\((?!\s*\))", f"::emulator::make<{alias}>(", source)
    return source


def _variables(body: str) -> str:
    """References in place of the variables in threadgroup memory."""
    result, numbers, done = "", count(), 0
    for match in threadgroup_declarations(without_comments(body)):
        start, end = match.start(1), match.end()
        replaced = _references(match[1], numbers)
        if replaced is not None:
            lines = "\n" * body.count("\n", start, end)
            result, done = result + body[done:start] + replaced + lines, end
    return result + body[done:]


def _references(declaration: str, numbers: count[int]) -> str | None:
    """None for a pointer or reference to threadgroup memory."""
    kind, rest = _type_and_rest(declaration)
    if not kind or rest.lstrip().startswith(("*", "&", "const")):
        return None
    result = ""
    for declarator in split_outside(rest):
        found = re.fullmatch(r"\s*(\w+)\s*((?:\[.*\])?)\s*", declarator, re.DOTALL)
        if not found:
            return None
        number = next(numbers)
        alias = f"emulator_type_{number}"
        result += (
            f"typedef {kind} {alias}{found[2]}; threadgroup {alias}& {found[1]} = "
            f'::emulator::variable<{alias}>({number}, "{found[1]}"); '
        )
    return result.replace("\n", " ")


def _type_and_rest(declaration: str) -> tuple[str, str]:
    match = _TYPE.match(declaration)
    if not match:
        return "", ""
    if not match[2]:
        return match[1].strip(), declaration[match.end() :]
    depth, position = 1, match.end()
    while depth and position < len(declaration):
        depth += (declaration[position] == "<") - (declaration[position] == ">")
        position += 1
    return declaration[match.start(1) : position], declaration[position:]


def _entry(pieces: Signature) -> str:
    arguments = [_argument(p, i) for i, p in enumerate(pieces.parameters)]
    arguments += [f"emulator_attributes()->{name}" for name in pieces.attributes]
    return (
        '\n#line 1 "entry"\nextern "C" EMULATOR_UNCHECKED void emulator_entry'
        f"(void* const* buffers) {{ {pieces.function}({', '.join(arguments)}); }}\n"
    )


def _argument(parameter: Parameter, index: int) -> str:
    pointer = f"emulator::pointer<{parameter.type}*>(buffers[{index}])"
    return f"*{pointer}" if parameter.reference else pointer
