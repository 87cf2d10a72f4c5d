"""Every check of the emulator: it finds the fault, and leaves the mended kernel alone."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from support.emulator_tiny import RAMP, fault, run
from support.kernels import exact

INT = {"outputs": (((32,), mx.int32),)}
TWO = {"outputs": (((32,), mx.float32), ((32,), mx.float32))}
WIDE = {"outputs": (((64,), mx.float32),), "grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
EIGHT = {"threadgroup": (8, 1, 1)}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SHARED = "threadgroup float s[32];\n"
FILLED = SHARED + "s[i] = a[i];\n"
MATRIX, SQUARE = (mx.zeros((64,)),), {"outputs": (((8, 8), mx.float32),)}
FIVE = mx.full((32,), 5, mx.int32)


@dataclass(frozen=True)
class Check:
    """With `wrong` in place of @ the body has a fault, with `right` none.

    words: a pattern of the message, which says file and line, thread, kind, what and which buffer.
    """

    words: str
    body: str
    wrong: str | int
    right: str | int
    inputs: tuple[mx.array, ...] = (RAMP,)
    settings: dict[str, Any] = field(default_factory=dict)


CHECKS = {
    # Bounds
    "a read behind the end of an input": Check(
        r"tiny.metal:3, thread \(31, 0, 0\): bounds: reads 4 bytes at byte 128 of a",
        "float x;\nx = a[@];\no[i] = x;", "i + 1", "min(i + 1, 31u)"),
    "a read before the start of an input": Check(
        "bounds: reads 4 bytes at byte -4 of a", "o[i] = a[int(i) - @];", 1, 0),
    **{f"a read {far} elements away is not taken for its neighbour": Check(
        "bounds: .* of a", "o[i] = a[int(i) + @] + b[i];", far, 0, (RAMP, RAMP))
       for far in (1000, 100_000_000, -100_000_000)},
    "a vector that reaches over the end": Check(
        "bounds: reads 16 bytes at byte 128 of a",
        "o[i] = dot(((const device float4*)(a + @))[i / 4], float4(1));", 4, 0),
    "a vector between two others": Check(
        "alignment: .*no multiple of 16",
        "o[i] = dot(((const device float4*)(a + @))[i / 8], float4(1));", 1, 0),
    "a write behind the end of an output": Check(
        "bounds: writes 4 bytes at byte 128 of o", "o[@] = 0;", "i + 1", "i"),
    "an index outside threadgroup memory": Check(
        "tiny.metal:3.*bounds: index 32 of an array", SHARED + "s[i + @] = 0;\no[i] = 0;", 1, 0),
    "an index outside a local array": Check(
        "tiny.metal:3.*bounds: index 4 of an array",
        "float t[4] = {0, 0, 0, 0};\no[i] = t[i % 4 + @];", 1, 0),
    "a pointer that leaves a threadgroup variable": Check(
        "tiny.metal:4.*bounds: writes 4 bytes at byte 128 of s",
        SHARED + "threadgroup float* p = s;\np[i + @] = 0;\no[i] = 0;", 1, 0),
    "an index outside a row of a two-dimensional array": Check(
        "bounds: index 16 of an array",
        "threadgroup float s[2][16];\ns[i / 16][i % @] = 0;\no[i] = 0;", 17, 16),
    "a matrix that reaches over the end": Check(
        "bounds: .* of a",
        "simdgroup_float8x8 z;\nsimdgroup_load(z, a + @, 8);\nsimdgroup_store(z, o, 8);",
        1, 0, MATRIX, SQUARE),
    "an empty input": Check(
        "bounds: .* of a, which has 0", "o[i] = @;", "a[i]", 1, (mx.zeros((0, 4)),)),
    "what lies between the rows of a slice": Check(
        "bounds: .*byte 64 of a, which lies between",
        "o[i] = a[(i / 16) * a_strides[0] + i % 16@];",
        " + 1", "", (mx.zeros((2, 100, 4))[:, :4],), {"ensure_row_contiguous": False}),
    "the shape of an input has bounds too": Check(
        "bounds: .* of a_shape", "o[i] = a_shape[@];", "i % 2", 0),
    "an address that belongs to nothing": Check(
        "bounds: .*belong to no buffer", "o[i] = *@;", "(const device float*)(16)", "a"),
    # Inputs are read-only
    "a write to an input": Check(
        "tiny.metal:2.*read-only: .* of a, which is an input",
        "@[i] = 1;\no[i] = 0;", "((device float*)a)", "o"),
    "an input is const to the compiler": Check(
        "compile: .*(read-only|const)", "@[i] = 1;\no[i] = 0;", "a", "o"),
    # Races
    "threadgroup memory read without a barrier": Check(
        "tiny.metal:4.*race: reads byte 0 of s, which thread 0",
        FILLED + "@o[i] = s[(i + 31) % 32 / 31 * 0];", "", BARRIER),
    "a thread's own value needs no barrier": Check(
        "race: ", FILLED + "o[i] = s[@];", "0", "i"),
    "two threads that write the same threadgroup element": Check(
        r"thread \(1, 0, 0\): race: writes byte 0 of s",
        SHARED + "s[i / @] = a[i];\n" + BARRIER + "o[i] = s[i / @];", 2, 1),
    "a write after others have read needs a barrier": Check(
        "race: .* of s, which thread 31 of the same threadgroup writes",
        FILLED + BARRIER + "float x = s[31 - i];\n@s[i] = x;\n" + BARRIER + "o[i] = s[i];",
        "", BARRIER),
    **{f"of many readers, thread {writer} writes too": Check(
        "race: (writes|reads)",
        SHARED + "s[i] = 0;\n" + BARRIER + "float x = s[0];\nif (i == @) s[0] = x + 1;\n"
        + BARRIER + "o[i] = x;", writer, 32) for writer in (0, 1, 31)},
    **{f"a barrier for {flag} does not order threadgroup memory": Check(
        "race: .* of s", FILLED + "threadgroup_barrier(mem_flags::@);\no[i] = s[31 - i];",
        flag, "mem_device | mem_flags::mem_threadgroup") for flag in ("mem_device", "mem_none")},
    "a SIMD-group's barrier orders no other's writes": Check(
        "uninitialised: .* of s",
        "threadgroup float s[64];\ns[i] = a[i % 32];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[@];",
        "63 - i", "i ^ 31", settings=WIDE),
    "a SIMD-group's barrier orders no other's reads": Check(
        r"thread \((3[2-9]|[4-6]\d), 0, 0\): race: .* of s",
        "threadgroup float s[64];\ns[i] = a[i % 32];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[@];",
        "i < 32 ? i : i - 32", "i", settings=WIDE),
    "a SIMD operation orders no memory": Check(
        "race: .* of s", FILLED + "float x = simd_sum(a[i]);\n@o[i] = s[31 - i] + x;",
        "", "simdgroup_barrier(mem_flags::mem_threadgroup);\n"),
    "device memory after a barrier for another": Check(
        "race: reads byte .* of o",
        "o[i] = a[i];\nthreadgroup_barrier(mem_flags::@);\np[i] = o[31 - i];",
        "mem_threadgroup", "mem_device", settings=TWO),
    "nothing orders two threadgroups": Check(
        r"thread \(8, 0, 0\): race: .*another threadgroup", "o[@] = a[i];", "i % 8", "i",
        settings=EIGHT),
    # Divergence
    **{f"a SIMD operation that some lanes skip, then {then or 'nothing'}": Check(
        "tiny.metal:[46].*divergence: .*reached by lane",
        "float x = 0;\nif (i < @) {\nx = simd_sum(a[i]);\n}\n" + then + "o[i] = x;", 16, 32)
       for then in ("", BARRIER, "x += simd_max(a[i]);\n")},
    "a matrix that some lanes do not load": Check(
        "divergence: .*simdgroup_",
        "simdgroup_float8x8 z;\nif (i < @) simdgroup_load(z, a, 8);\nsimdgroup_store(z, o, 8);",
        16, 32, MATRIX, SQUARE),
    "a SIMD operation in a function of the header": Check(
        "head.metal:2, .*divergence: .*simd_sum", "o[i] = 0;\nif (i < @) o[i] = mean(a[i]);", 5, 32,
        settings={"header": "inline float mean(float x) {\n  return simd_sum(x) / 32;\n}\n"}),
    "lanes that have returned do not reach a SIMD operation": Check(
        "divergence: .*has returned",
        "o[i] = 0;\nif (i >= @) return;\no[i] = simd_sum(a[i]);", 30, 32),
    "two different SIMD operations in two branches": Check(
        "divergence: .*waits at simd_sum on line 3",
        "if (i % @ == 0) {\no[i] = simd_sum(a[i]);\n} else {\no[i] = simd_sum(a[i]);\n}", 2, 1),
    **{f"a barrier that some threads skip by {skip}": Check(
        "tiny.metal:6.*divergence: .*threadgroup_barrier",
        FILLED + "o[i] = 0;\nif (i >= @) { " + skip + " } else {\n" + BARRIER + "}\no[i] = s[i];",
        16, 32) for skip in ("return;", ";")},
    "a barrier that a whole SIMD-group skips": Check(
        "divergence: .*threadgroup_barrier", "if (i < @) {\n" + BARRIER + "}\no[i] = 0;", 32, 64,
        settings=WIDE),
    "two barriers in two branches": Check(
        "divergence: .*while others wait at the one on line 3",
        "if (i < @) {\n" + BARRIER + "} else {\n" + BARRIER + "}\no[i] = 0;", 16, 32),
    "a loop that some lanes leave earlier": Check(
        "divergence: .*simd_sum",
        "float x = 0;\nfor (uint n = 0; n < @; ++n) {\nx += simd_sum(a[n]);\n}\no[i] = x;",
        "2 + i % 2", "2 + i / 32"),
    # Uninitialised
    "threadgroup memory starts uninitialised in every threadgroup": Check(
        r"tiny.metal:5, thread \(8, 0, 0\): uninitialised: reads byte 0 of s",
        SHARED + "if (threadgroup_position_in_grid.x == 0 || @)\ns[i % 8] = 1;\no[i] = s[i % 8];",
        "false", "true", settings=EIGHT),
    "a local array that is read before it is written": Check(
        "tiny.metal:5.*uninitialised: .* of o from an uninitialised variable",
        "float t[4];\n#pragma clang loop unroll(full)\n"
        "for (int n = @; n < 4; ++n) t[n] = a[n];\no[i] = t[i % 4] * 2;", 1, 0),
    **{f"an uninitialised local of {dtype}": Check(
        "uninitialised: .* of o from an uninitialised",
        "float t[2];\nt[0] = 1;\no[i] = T(t[i % @]);", 2, 1,
        settings={"template": (("T", dtype),), "outputs": (((32,), dtype),)})
       for dtype in (mx.float32, mx.float16, mx.bfloat16)},
    "a local that the compiler sees uninitialised": Check(
        "tiny.metal:3: uninitialised: .*uninitialized", "float x@;\no[i] = x;", "", " = 1"),
    "a shuffle from a lane that is not there": Check(
        "uninitialised: .* of o", "o[i] = simd_shuffle(a[i], @);", "lane + 1", "(lane + 1) % 20",
        settings={"grid": (20, 1, 1), "outputs": (((20,), mx.float32),)}),
    "an output that is read before it is written": Check(
        "uninitialised: reads byte 0 of o before", "o[i] @ a[i];", "+=", "="),
    # Unwritten
    "an element of an output that nobody writes": Check(
        "unwritten: 1 of 32 elements of o are never written, the first is 5",
        "if (i != @) o[i] = 1;", 5, 32),
    "an output nobody writes at all": Check(
        "unwritten: 32 of 32 elements of p", "o[i] = 1;\n@[i] = 1;", "o", "p", settings=TWO),
    # Limits, arithmetic and types
    "a vector of the wrong number of values": Check(
        "compile: .*a vector is made of", "o[i] = float4(1, 2@).x;", "", ", 3, 4"),
    "a function of another address space": Check(
        "address space: .*first", FILLED + "o[i] = first(@);", "s", "a",
        settings={"header": "inline float first(const device float* p) { return p[0]; }\n"}),
    "more than 32 KiB of threadgroup memory": Check(
        "limit: .*32772 bytes; the limit is 32768",
        "threadgroup float s[@];\nthreadgroup float t[1];\ns[i] = t[0] = 0;\no[i] = s[i];",
        8192, 8191, settings={"grid": (1, 1, 1), "outputs": (((1,), mx.float32),)}),
    "division by 0": Check(
        "arithmetic: .*division by 0", "o[i] = 7 / (a[i] - @);", 5, 4, (FIVE,), INT),
    "a shift that is too far": Check(
        "arithmetic: .*shift by 32", "o[i] = 1 << (a[i] + @);", 27, 2, (FIVE,), INT),
}  # fmt: skip
# Pointers into the wrong address space and the right one
CHECKS |= {
    f"{wrong} for {right}": Check(
        r"tiny.metal:3.*address space: ",
        SHARED + "@\ns[i] = 0;\n" + BARRIER + "o[i] = *p;",
        f"{declared.replace('?', wrong)} = {value}",
        f"{declared.replace('?', right)} = {value}",
    )
    for wrong, right, declared, value in (
        ("device", "threadgroup", "? float* p", "s;"),
        ("threadgroup", "device", "const ? float* p", "a;"),
        ("thread", "device", "const ? float* p", "a;"),
        ("threadgroup", "thread", "float t[2] = {0, 0}; ? float* p", "t;"),
        ("constant", "device", "const ? float* p", "a;"),
    )
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_fault_is_found_and_the_mended_kernel_left_alone(name):
    check = CHECKS[name]
    wrong, right = (check.body.replace("@", str(part)) for part in (check.wrong, check.right))
    fault(None, check.words, wrong, *check.inputs, **check.settings)
    run(right, *check.inputs, **check.settings)


@pytest.mark.parametrize("threadgroup", [(1025, 1, 1), (64, 8, 4), (0, 1, 1)])
def test_threadgroups_have_at_most_1024_threads(threadgroup):
    wide = {"outputs": (((2048,), mx.float32),), "grid": (2048, 1, 1)}
    fault("limit", "1 to 1024 threads", "o[i] = 0;", threadgroup=threadgroup, **wide)
    wide |= {"threadgroup": (1024, 1, 1), "falls_back": True}
    assert run("o[i] = 0;", **wide)[1].threadgroups == 2


def test_a_fault_is_one_sentence_knows_its_buffer_and_the_next_launch_runs():
    error = fault("bounds", "of a", "o[i] = a[i + 1];", RAMP)
    assert str(error) == (
        "kernel tiny, tiny.metal:2, thread (31, 0, 0): bounds: "
        "reads 4 bytes at byte 128 of a, which has 128"
    )
    assert (error.buffer, error.file, error.line) == ("a", "tiny.metal", 2)
    assert exact(run("o[i] = a[i] + 1;", RAMP)[0])[31] == 32
