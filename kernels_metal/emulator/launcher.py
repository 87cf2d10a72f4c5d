"""Calls the runtime: the structures of runtime/abi.h, and what comes back."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kernels_metal.emulator.compiler import compile_kernel, compile_runtime
from kernels_metal.emulator.errors import EmulatorError
from kernels_metal.emulator.memory import (
    Memory,
    new_output,
    read_array,
    read_integers,
    write_array,
)
from kernels_metal.emulator.signature import Parameter, generate
from kernels_metal.emulator.translate import translate
from kernels_metal.factory import Kernel, Launch

_INPUT, _OUTPUT, _METADATA = 0, 1, 2
_FAILURES = (
    "",
    "bounds",
    "read-only",
    "race",
    "divergence",
    "uninitialised",
    "unwritten",
    "limit",
    "arithmetic",
    "alignment",
)
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_Three = ctypes.c_uint32 * 3


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("holes", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("origin", ctypes.c_uint64),
        ("item", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("floating", ctypes.c_uint32),
        ("read", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("fetched", ctypes.c_uint64),
    ]


class _Line(ctypes.Structure):
    _fields_ = [("pc", ctypes.c_uint64), ("file", ctypes.c_char_p), ("line", ctypes.c_uint64)]


_COUNTERS = (
    "threads",
    "threadgroups",
    "simd_operations",
    "barriers",
    "simdgroup_barriers",
    "threadgroup_bytes",
    "matrix_products",
    "device_accesses",
    "threadgroup_accesses",
    "threadgroup_cycles",
)


class _Counters(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _COUNTERS]


class _Error(ctypes.Structure):
    _fields_ = [
        ("failure", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("has_position", ctypes.c_uint32),
        ("position", _Three),
        ("file", ctypes.c_char * 256),
        ("buffer", ctypes.c_char * 64),
        ("message", ctypes.c_char * 512),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("lines", ctypes.c_void_p),
        ("line_count", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("grid", _Three),
        ("threadgroup", _Three),
        ("counters", _Counters),
        ("error", _Error),
    ]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one input or output.

    `read` and `written` add up every access of every thread. `fetched` counts what at least one
    thread of a threadgroup read, once for each threadgroup: what has to come from memory when a
    threadgroup shares all it loads. `size` is the array itself.
    """

    size: int
    read: int
    written: int
    fetched: int


@dataclass(frozen=True)
class Counters:
    """What a launch did.

    SIMD operations, matrix products among them, count once for a SIMD-group, barriers once for a
    threadgroup, accesses (a vector is one) for every thread; `threadgroup_bytes` is the threadgroup
    memory of one threadgroup, `threadgroup_cycles` what its banks take for all SIMD-groups.
    """

    kernel: str
    threads: int
    threadgroups: int
    simd_operations: int
    barriers: int
    simdgroup_barriers: int
    threadgroup_bytes: int
    matrix_products: int
    device_accesses: int
    threadgroup_accesses: int
    threadgroup_cycles: int
    buffers: dict[str, Traffic]


class _Slot(NamedTuple):
    """A buffer of the launch, and the memory behind it."""

    parameter: Parameter
    memory: Memory
    buffer: _Buffer


class _Code(NamedTuple):
    """A compiled kernel."""

    entry: int
    lines: int
    line_count: int


_running = threading.Lock()  # the runtime has one arena


@functools.cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_runtime()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _load(path: Path) -> _Code:
    _runtime()
    library = ctypes.CDLL(str(path))
    entry = ctypes.cast(library.emulator_entry, ctypes.c_void_p).value or 0
    table = ctypes.c_uint64.in_dll(library, "emulator_lines")
    address = ctypes.addressof(table)
    count = 0
    while _Line.from_address(address + count * ctypes.sizeof(_Line)).pc:
        count += 1
    return _Code(entry, address, count)


def run_kernel(
    kernel: Kernel, inputs: Sequence[mx.array], plan: Launch
) -> tuple[list[mx.array], Counters]:
    """Run a kernel on the CPU. Raises EmulatorError for everything that is wrong with it."""
    code = _load(compile_kernel(kernel.name, translate(kernel, inputs, plan)))
    slots = _slots(kernel, inputs, plan)
    buffers = (_Buffer * len(slots))(*(slot.buffer for slot in slots))
    sizes = tuple(min(n, grid) for n, grid in zip(plan.threadgroup, plan.grid, strict=True))
    launch = _Launch(code.entry, code.lines, code.line_count, buffers, len(slots), plan.grid, sizes)
    with _running:
        failed = _runtime().emulator_run(ctypes.byref(launch))
    if failed:
        raise _error(kernel, launch.error)
    outputs = [
        write_array(slot.memory.data, shape, dtype)
        for slot, shape, dtype in zip(
            slots[-len(kernel.outputs) :], plan.output_shapes, plan.output_dtypes, strict=True
        )
    ]
    return outputs, _counters(kernel, launch, slots)


def _slots(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> list[_Slot]:
    arrays = dict(zip(kernel.inputs, inputs, strict=True))
    memories = {n: read_array(x, kernel.ensure_row_contiguous) for n, x in arrays.items()}
    outputs = dict(
        zip(kernel.outputs, zip(plan.output_shapes, plan.output_dtypes, strict=True), strict=True)
    )
    result = []
    for parameter in generate(kernel, inputs, plan).parameters:
        if parameter.of in outputs:
            shape, dtype = outputs[parameter.of]
            memory = Memory(new_output(shape, dtype), None, 0, shape, ())
            kind, item, floating = _OUTPUT, dtype.size, dtype in _FLOATS
        elif parameter.part:
            memory = _metadata(memories[parameter.of], parameter.part)
            kind, item, floating = _METADATA, 4, False
        else:
            memory = memories[parameter.of]
            kind, item, floating = _INPUT, arrays[parameter.of].dtype.size, False
        buffer = _Buffer(
            name=parameter.name.encode(),
            data=memory.data.ctypes.data,
            holes=None if memory.holes is None else memory.holes.ctypes.data,
            bytes=memory.data.nbytes,
            origin=memory.origin,
            item=item,
            kind=kind,
            floating=floating,
        )
        result.append(_Slot(parameter, memory, buffer))
    return result


def _metadata(memory: Memory, part: str) -> Memory:
    if part == "shape":
        return read_integers(memory.shape, np.int32)
    if part == "strides":
        return read_integers(memory.strides, np.int64)
    return read_integers((len(memory.shape),), np.int32)


def _error(kernel: Kernel, error: _Error) -> EmulatorError:
    position = (int(error.position[0]), int(error.position[1]), int(error.position[2]))
    return EmulatorError(
        _FAILURES[error.failure],
        error.message.decode(),
        kernel.name,
        (error.file.decode(), int(error.line)),
        position if error.has_position else None,
        error.buffer.decode(),
    )


def _counters(kernel: Kernel, launch: _Launch, slots: Sequence[_Slot]) -> Counters:
    traffic = {
        slot.parameter.name: Traffic(int(b.bytes), int(b.read), int(b.written), int(b.fetched))
        for slot, b in zip(slots, launch.buffers[: len(slots)], strict=True)
        if not slot.parameter.part
    }
    values = {name: int(getattr(launch.counters, name)) for name in _COUNTERS}
    return Counters(kernel=kernel.name, buffers=traffic, **values)
