"""The text MLX generates around a kernel's body, without Metal.

A test compares it with what MLX prints for every kernel of the catalog, so it cannot drift.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kernels_metal.factory import Kernel, Launch, TemplateValue

CONSTANT_BELOW = 8  # elements: smaller inputs come as `constant`

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

# Given to the kernel when its body mentions the name; in MLX's order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


@dataclass(frozen=True)
class Parameter:
    """A buffer of the kernel: `of` is the input or output, `part` what of it ("" for its elements).

    `reference` is true where MLX passes one value by reference instead of a pointer.
    """

    type: str
    name: str
    of: str
    part: str = ""
    reference: bool = False

    @property
    def declaration(self) -> str:
        """As in the text, without the buffer's number."""
        return f"{self.type}{'&' if self.reference else '*'} {self.name}"


@dataclass(frozen=True)
class Signature:
    """MLX's text in pieces; `head`, body and `tail` follow each other."""

    function: str
    template_arguments: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]
    head: str
    tail: str


def signature(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> str:
    """All that MLX would compile: header, generated signature, body and instantiation."""
    pieces = generate(kernel, inputs, plan)
    header, body = kernel.sent
    return header + pieces.head + body + pieces.tail


def generate(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> Signature:
    """The pieces around the body."""
    body = kernel.sent[1]  # names in comments do not count
    arguments = ", ".join(_value_text(value) for _, value in plan.template)
    function = _function_name(kernel, inputs, plan, arguments)
    parameters = (*_input_parameters(kernel, inputs, body), *_output_parameters(kernel, plan))
    attributes = tuple(name for name in ATTRIBUTES if name in body)
    declared = [f"  {p.declaration} [[buffer({i})]]" for i, p in enumerate(parameters)]
    declared += [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in attributes]
    template = _template_text(plan)
    head = f"{template}[[kernel]] void {function}(\n" + ",\n".join(declared) + ") {\n"
    tail = "\n}\n"
    if plan.template:
        tail += (
            f'\ntemplate [[host_name("{function}")]] [[kernel]] '
            f"decltype({function}<{arguments}>) {function}<{arguments}>;\n"
        )
    return Signature(function, arguments, parameters, attributes, head, tail)


def _value_text(value: TemplateValue) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))


def _template_text(plan: Launch) -> str:
    if not plan.template:
        return ""
    return f"template <{', '.join(f'{_kind(v)} {name}' for name, v in plan.template)}>\n"


def _kind(value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _function_name(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch, arguments: str) -> str:
    name = f"custom_kernel_{kernel.name}"
    if plan.template:
        name += "_" + re.sub(r", |[<-]", "_", f"<{arguments}")
    name += "".join(f"_{TYPES[x.dtype]}{_storage_letter(x)}" for x in inputs)
    return name + "".join(f"_{TYPES[dtype]}" for dtype in plan.output_dtypes)


def _storage_letter(x: mx.array) -> str:
    if x.ndim == 0:
        return "s"
    return "c" if x.size < CONSTANT_BELOW else ""


def _input_parameters(kernel: Kernel, inputs: Sequence[mx.array], body: str) -> list[Parameter]:
    result = []
    for name, x in zip(kernel.inputs, inputs, strict=True):
        space = "constant" if x.size < CONSTANT_BELOW else "device"
        scalar = x.ndim == 0
        result.append(Parameter(f"const {space} {TYPES[x.dtype]}", name, name, "", scalar))
        if scalar:
            continue
        for part, kind in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
            full = f"{name}_{part}"
            if full in body:
                result.append(Parameter(f"const constant {kind}", full, name, part, part == "ndim"))
    return result


def _output_parameters(kernel: Kernel, plan: Launch) -> list[Parameter]:
    return [
        Parameter(f"device {TYPES[dtype]}", name, name)
        for name, dtype in zip(kernel.outputs, plan.output_dtypes, strict=True)
    ]
