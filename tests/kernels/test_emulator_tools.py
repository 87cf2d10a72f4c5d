"""The lint, the compiler, the signature around a body, and the command line."""

import os
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest

from kernels_metal import factory
from kernels_metal.catalog import CATALOG, OPERATIONS
from kernels_metal.checks import FLOATS
from kernels_metal.emulator import EmulatorError, __main__, compiler
from kernels_metal.emulator.signature import ATTRIBUTES, CONSTANT_BELOW, signature
from kernels_metal.factory import TYPES, Kernel, Launch, launch
from support.emulator_tiny import RAMP, fault, run, tiny
from support.kernels import Sample, arguments, exact, launches, random_calls

# The lint: what it refuses, and the same thing as Metal wants it

LINT = {
    "double x = 1; o[i] = float(x);": "float x = 1; o[i] = x;",
    "float* p = nullptr; o[i] = p ? 1 : 0;": "thread float* p = nullptr; o[i] = p ? 1 : 0;",
    "const float& x = o[i];": "const device float& x = a[i]; o[i] = x;",
    "o[i] = *(float*)(a + i);": "o[i] = *(const device float*)(a + i);",
    "o[i] = *reinterpret_cast<const T*>(a);": "o[i] = *reinterpret_cast<const device T*>(a);",
    "o[i] = *new float(1);": "float renewed = 1; o[i] = renewed; // no new, no double",
    "goto end; end: o[i] = 0;": "/* goto is not part of Metal; float* p */ o[i] = 0;",
    "try { o[i] = 0; } catch (...) {}": "int retry = 0; o[i] = retry;",
    "o[i] = std::min(1, 2);": "o[i] = metal::min(1, 2);",
    "auto f = [&](float x) { return x; }; o[i] = f(1);": "float t[2] = {1, 2}; o[i] = t[(i) % 2];",
    "if (i < 9) { threadgroup float s[1]; } o[i] = 0;": "threadgroup float s[32]; s[i] = o[i] = 0;",
    "threadgroup float s = 3; o[i] = 0;": "threadgroup float s; if (i == 0) s = 1; o[i] = 0;",
    "o[i] = ((float4)(1)).x;": "o[i] = float4(1).x;",
    "o[i] = static_cast<int4>(float4(1)).x;": "o[i] = int4(float4(1)).x;",
    "using V = vec<T, 4>; o[i] = ((V)(1.0f)).x;": "using V = vec<T, 4>; o[i] = V(1.0f).x;",
    "ulong4 x = 0; o[i] = x.x;": "ulong2 x = 0; o[i] = x.x;",
    "static float x = 1; o[i] = x;": "float statics = 1; o[i] = static_cast<float>(statics);",
    "static constexpr int X = 1; o[i] = X;": "constexpr int X = 1; o[i] = X;",
}
T = {"template": (("T", mx.float32),)}


def test_faults_are_told_by_lines_of_the_kernel_s_file():
    for kernel in (kernel for operation in OPERATIONS for kernel in operation.kernels):
        assert kernel.body.endswith(text := kernel.path.read_text(encoding="utf-8"))
        assert kernel.body.count("\n") == text.count("\n"), kernel.inputs


@pytest.mark.parametrize("refused", LINT)
def test_the_lint_refuses_what_metal_has_not(refused):
    error = fault("lint", ".", "\n" + refused, RAMP, **T)
    assert (error.file, error.line) == ("tiny.metal", 3)
    run(LINT[refused], RAMP, **T)


HEADERS = {
    "inline float half_of(float x) { return x / 2; }\n"
    "inline float f(float x) {\n  return x < 1 ? x : f(half_of(x));\n}\n": 2,
    "float g(float x);\ninline float f(float x) { return g(x); }\n"
    "inline float g(float x) { return x < 1 ? x : f(x / 2); }\n": 2,
    "inline float f(float x) {\n  threadgroup float s[2];\n  return x;\n}\n": 2,
    "struct S {\n  float* p;\n};\ninline float f(float x) { return x; }\n": 2,
    "\n\ninline void take(S* s) {}\nstruct S { float x; };\n": 3,
    "static int calls(int x) { return x; }\n": 1,
    "constexpr int X = 3;\ninline float f(float x) { return x; }\n": 1,
    "inline float f(float x) { return x; }\n\nconst float TABLE[2] = {1, 2};\n": 3,
    "#define ONE \\\n  int x = 1;\nfloat y;\n": 3,
    "namespace n {\ntypedef int I;\nI x = 3;\n}\n": 3,
    "template <typename T>\nconstexpr int X = 3;\n": 1,
    "struct S {\n  int x;\n} s;\n": 1,
}


@pytest.mark.parametrize("header", HEADERS)
def test_the_lint_reads_headers_too(header):
    error = fault("lint", ".", "o[i] = f(a[i]);", RAMP, header=header)
    assert (error.file, error.line) == ("head.metal", HEADERS[header])


def test_constants_types_and_functions_that_call_others_stand_outside_functions():
    header = """#define TWICE(x) \\
      ((x) * 2)
    namespace n {
    constant int TABLE[2] = {1, 2};
    template <typename V> constant constexpr V ONE = 1;
    }
    struct S { static constant constexpr int X = 1; float x; };
    enum E { A, B };
    typedef float F;
    using namespace n;
    static_assert(sizeof(S) == 4, "");
    F e(float x);
    static inline F g(float x) { return x; }
    static inline F h(float x) { if (x > 0) { return g(x); } return g(x + 1); }
    static inline F f(float x) { int y = TWICE(1); return x + y + S::X + TABLE[1] + ONE<int>; }
    """
    assert exact(run("o[i] = f(g(a[i])) + h(0) - 1;", RAMP, header=header)[0])[1] == 7


# The compiler


def test_a_compile_error_names_the_file_and_line_of_the_kernel():
    error = fault("compile", "undeclared identifier 'nothing'", "\n\no[i] = nothing;")
    assert (error.file, error.line) == ("tiny.metal", 4)
    error = fault(
        "compile", "'nothing'", "o[i] = f();", header="\ninline int f() { return nothing; }\n"
    )
    assert (error.file, error.line) == ("head.metal", 2)


def test_compiled_kernels_are_kept_and_told_apart_by_their_text(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path / "deep" / "cache")
    with pytest.raises(EmulatorError):
        compiler.compile_kernel("bad", "this is not C++")
    source = '#include <metal_stdlib>\nextern "C" int emulator_entry() { return 1; }\n'
    first = compiler.compile_kernel("one", source)
    stamp = first.stat().st_mtime_ns
    assert compiler.compile_kernel("one", source) == first
    assert first.stat().st_mtime_ns == stamp  # not compiled again
    assert compiler.compile_kernel("one", source.replace("1", "2")) != first
    assert sorted(p.name[:3] for p in first.parent.iterdir()) == ["one", "one"]  # nothing left over


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("clang version 18.1.3 (1ubuntu1)", True),
        ("clang version 17.0.6", False),
        ("Apple clang version 17.0.0 (clang-1700.0.13.3)", False),
        ("gcc (Debian 12.2.0)", False),
    ],
)
def test_a_clang_from_path_must_be_18_or_newer(version, good, tmp_path, monkeypatch):
    clang = tmp_path / "clang"
    clang.write_text(f"#!/bin/sh\necho '{version}'\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = compiler.find_compiler().command
    assert (found == (str(clang),)) == good
    if not good:
        assert found[0].endswith("ziglang/zig")


def test_no_compiler_at_all_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        EmulatorError, match="emulator: compile: no clang 18 or newer .*pip install ziglang"
    ):
        compiler._find_compiler.__wrapped__(str(tmp_path))


# The signature, letter for letter


@pytest.fixture
def same_as_mlx(capfd, tmp_path):
    """The check that the emulator writes, letter for letter, the signature that MLX prints.

    MLX prints while a graph with the kernel is traced; nothing is computed.
    """

    def check(sample: Sample) -> None:
        kernel, inputs, plan = sample

        def traced(*inputs: mx.array) -> list[mx.array]:
            return factory.metal(kernel, inputs, plan, verbose=True)

        capfd.readouterr()
        factory._compiled.cache_clear()  # the files of tiny kernels change under the same name
        mx.export_function(str(tmp_path / "traced.mlxfn"), traced, *inputs)
        printed = capfd.readouterr().out.partition("```\n")[2].rpartition("\n```")[0]
        assert signature(kernel, inputs, plan) == printed

    return check


SMALL = {  # inputs below 8 elements, which MLX passes as `constant`
    "cascade_attention": {"rows": 1, "prefix": 2, "heads": 1, "kv_heads": 1},
    "draft_head": {"rows": 1, "vocabulary": 7, "k": 4},
    "verify_qmm": {"rows": 2, "depth": 32, "columns": 1, "group": 32},
}


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_kernels_have_the_signature_of_mlx_in_calls_of_all_kinds(made, same_as_mlx):
    calls = random_calls(made)
    calls += [arguments(made, dtype, **SMALL.get(made.name, {})) for dtype in FLOATS]
    samples = {}
    for kernel, inputs, plan in (sample for call in calls for sample in launches(made, *call)):
        few = tuple(array.size < CONSTANT_BELOW for array in inputs)
        samples[kernel.name, plan.template, few] = kernel, inputs, plan
    for sample in samples.values():
        same_as_mlx(sample)
    assert {name for name, _, _ in samples} == {kernel.name for kernel in made.kernels}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_types_of_inputs_outputs_and_templates(dtype, same_as_mlx, tmp_path):
    template = (("T", dtype), ("N", 3), ("M", -12), ("B", True), ("C", False))
    outputs = ((4,), dtype), ((4,), mx.int8)
    same_as_mlx(
        tiny(tmp_path, "o[0] = 0;", mx.zeros((9,), dtype), outputs=outputs, template=template)
    )


def test_both_sides_of_the_limit_of_constant_inputs_and_scalars(same_as_mlx, tmp_path):
    body = "a_shape; a_strides; a_ndim; b_shape; c_ndim; d_shape;"
    shapes = [(CONSTANT_BELOW - 1,), (CONSTANT_BELOW,), (), (0, 3), (2, 4), (7, 1)]
    sample = tiny(tmp_path, body, *map(mx.zeros, shapes))
    text = signature(*sample)
    assert "const constant float* a " in text and "const device float* b " in text
    assert "const constant float& c " in text
    same_as_mlx(sample)


def test_mlx_gets_the_source_without_comments_and_indentation_but_line_by_line(
    same_as_mlx, tmp_path
):
    body = "#pragma unroll\n  for (int i = 0; i < 1; ++i) {  // a_strides\n\n    o[i] = 0;\n  }"
    sample = tiny(tmp_path, body, mx.zeros((9,)), header="  // one\nconstant int x = 1;\n")
    header, sent = sample[0].sent
    assert header == "constant int x = 1;\n"
    assert sent == "#pragma unroll\nfor (int i = 0; i < 1; ++i) {\no[i] = 0;\n}\n"
    assert "a_strides" not in signature(*sample)
    same_as_mlx(sample)


@pytest.mark.parametrize("header", ["", "// one\nconstant int x = 1;\n"])
def test_each_attribute_that_the_body_names_and_all_of_them(header, same_as_mlx, tmp_path):
    for body in (*ATTRIBUTES, " ".join(ATTRIBUTES)):
        same_as_mlx(tiny(tmp_path, body, mx.zeros((9,)), header=header))


# The command line


def test_the_command_prints_the_traffic_of_every_launch():
    """As a module, as people call it."""
    sizes = ["rows=2", "vocabulary=5000,k=4"]
    done = subprocess.run(
        [sys.executable, "-m", "kernels_metal.emulator", "draft_head", "--shape", *sizes],
        capture_output=True, text=True, env=os.environ, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("draft_head rows=2 vocabulary=5000 k=4\n")
    assert "\ndraft_head: 2 threadgroups, 512 threads" in done.stdout
    assert "\ndraft_head_merge: " in done.stdout
    (logits,) = (line.split() for line in done.stdout.splitlines() if line.startswith("  logits"))
    assert logits == ["logits", "20000", "20000", "1.00", "20000", "1.00", "0"]


@pytest.mark.parametrize("name", CATALOG)
def test_the_command_runs_every_kernel_of_the_catalog(name, capsys):
    of_few_rows = {"cascade_merge": "prefix=400,rows=2", "verify_qmm": "rows=3"}
    small = of_few_rows.get(name, "prefix=40" if "prefix" in CATALOG[name].defaults else "")
    assert __main__.main([name, "--shape", small]) == 0
    assert f"\n{name}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shape", "value"),
    [
        *[("verify_qmm", shape, f"--shape {shape}: ") for shape in ("rows", "rows=-1", "colour=3")],
        ("verify_qmm", "bits=5", "bits is 5"),
        ("nothing", "", "norm_rope"),
    ],
)
def test_the_command_refuses_names_and_sizes_that_are_not_known(name, shape, value, capsys):
    try:
        code = __main__.main([name, "--shape", shape])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and value in capsys.readouterr().err


def test_a_fault_ends_the_command_with_code_1(capsys, monkeypatch, tmp_path):
    kernel = Kernel("faulty", (), ("o",), folder=tmp_path)
    (tmp_path / "faulty.metal").write_text("o[1] = 1;")
    plan = Launch((1, 1, 1), (1, 1, 1), ((1,),), (mx.float32,))
    faulty = replace(
        CATALOG["norm_rope"], kernel=lambda: launch(kernel, [], plan), arguments=lambda draw: ()
    )
    monkeypatch.setitem(CATALOG, "faulty", faulty)
    assert __main__.main(["faulty"]) == 1
    assert "kernel faulty, faulty.metal:1, thread (0, 0, 0): bounds" in capsys.readouterr().err
