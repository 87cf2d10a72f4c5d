"""The texts that Apple's compiler gets in CI, and what the lint refuses of them before."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernels_metal import variants
from kernels_metal.catalog import OPERATIONS
from kernels_metal.emulator import __main__, texts
from kernels_metal.emulator.lint import SAFE_THREADS
from kernels_metal.emulator.signature import signature
from support.emulator_tiny import RAMP, fault, run

ASKED = "#pragma clang loop unroll(full)\n"
FOUR = "float t[4];\n"
LOOP = "for (int k = 0; k < 4; ++k) { t[k] = 1; }\n"
SUM = "o[i] = t[0] + t[1] + t[2] + t[3];"
INSERT = f"inline void fill(thread float* t) {{\n@{LOOP}}}\n"
# What indexes registers in a loop, with @ for the pragma
ROLLED = {
    "the counter": FOUR + "@" + LOOP + SUM,
    "a loop without braces": FOUR + "@for (int k = 0; k < 4; ++k) t[k] = k;\n" + SUM,
    "what is made of the counter": FOUR
    + "@for (int k = 0; k < 2; ++k) { const int at = k * 2; t[at] = t[at + 1] = 1; }\n"
    + SUM,
    "the outer of two counters": FOUR
    + f"@for (int k = 0; k < 2; ++k) {{\n{ASKED}for (int j = 0; j < 2; ++j)"
    + " { t[k * 2 + j] = 1; }}\n"
    + SUM,
    "an array beside others": "float s = 0, t[4];\n@" + LOOP + SUM,
    "vectors": "vec<float, 2> t[4];\n@for (int k = 0; k < 4; ++k) { t[k] = float2(1.0f); }\n"
    + "o[i] = t[0][0] + t[3][1];",
}
# Loops that index no array in registers
FREE = {
    "memory of a threadgroup": "threadgroup float t[32];\n"
    "for (int k = 0; k < 32; k += 32) { t[k + i] = 1; }\no[i] = t[i];",
    "a counter that is no index": FOUR
    + f"{ASKED}{LOOP}for (int n = 0; n < 3; ++n) {{ t[0] += float(n); }}\n"
    + SUM,
    "an unrolled loop inside of another": FOUR
    + f"for (int n = 0; n < 3; ++n) {{\n{ASKED}for (int k = 0; k < 4; ++k) {{ t[k] = 2; }}}}\n"
    + SUM,
}


@pytest.mark.parametrize("name", ROLLED)
def test_a_loop_over_registers_without_the_pragma_is_refused(name):
    error = fault("lint", r"unroll\(full\)", ROLLED[name].replace("@", ""), RAMP)
    assert " t, an array in registers" in str(error)
    run(ROLLED[name].replace("@", ASKED), RAMP)


def test_a_loop_of_a_function_in_the_header_is_one_too():
    settings = {"body": FOUR + "fill(t);\n" + SUM}
    error = fault("lint", "unroll", settings["body"], RAMP, header=INSERT.replace("@", ""))
    assert (error.file, error.line) == ("head.metal", 2)
    run(settings["body"], RAMP, header=INSERT.replace("@", ASKED))


@pytest.mark.parametrize("name", FREE)
def test_other_loops_may_stay_loops(name):
    run(FREE[name], RAMP)


@pytest.mark.parametrize("place", ["body", "header"])
def test_what_is_not_ascii_is_refused_in_comments_too(place):
    body, header = "o[i] = a[i];\n", "inline float f(float x) { return x; }\n"
    odd = {"body": body, "header": header}
    odd[place] += "// 8\u00d78\n"
    error = fault("lint", "\u00d7 is not ASCII", odd["body"], RAMP, header=odd["header"])
    assert (error.file, error.line) == (("tiny.metal", 3) if place == "body" else ("head.metal", 2))


def test_more_threads_than_an_m1_has_registers_for_need_another_kernel_behind_them():
    threads = {"grid": (SAFE_THREADS + 32, 1, 1), "threadgroup": (SAFE_THREADS + 32, 1, 1)}
    body = "if (i < 32) { o[i] = 0; }"
    fault("limit", f"threadgroups of {SAFE_THREADS + 32} threads", body, **threads)
    run(body, **threads, falls_back=True)


def test_every_variant_is_written_as_mlx_would_have_it(tmp_path, monkeypatch, capsys):
    some = [call for call in variants.calls() if call.operation in ("draft_head", "norm_rope")]
    monkeypatch.setattr(texts, "calls", lambda: some)
    assert __main__.main(["--text", str(tmp_path)]) == 0
    written = {file.read_text() for file in tmp_path.iterdir()}
    assert f"{len(written)} texts" in capsys.readouterr().out
    assert written == {signature(*sample) for call in some for sample in variants.launches(call)}
    for top in (4, 16):
        assert any(f"constexpr int TOP = {top};" in text for text in written)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert __main__.main(["--text", str(blocked)]) == 2
    assert str(blocked) in capsys.readouterr().err


def test_a_text_that_the_lint_refuses_is_not_written(tmp_path, monkeypatch, capsys):
    call = variants.calls()[0]
    wide = [(k, i, replace(p, threadgroup=(512, 1, 1))) for k, i, p in variants.launches(call)]
    monkeypatch.setattr(texts, "calls", lambda: [call])
    monkeypatch.setattr(texts, "launches", lambda call: wide)
    assert __main__.main(["--text", str(tmp_path / "out")]) == 1
    assert "512 threads" in capsys.readouterr().err


def test_variants_are_those_of_all_kernels_and_dtypes():
    launched = {}
    for call in variants.calls():
        if call.dtype == "float16":
            for kernel, _, plan in variants.launches(call):
                launched.setdefault(kernel.name, set()).add(plan.template)
    assert launched.keys() == {kernel.name for made in OPERATIONS for kernel in made.kernels}
    assert {dict(t)["TILES"] for t in launched["verify_qmm_matrix"]} == {1, 2, 3, 4}
    assert {dict(t)["COLS"] for t in launched["verify_qmm_matrix"]} == {1, 2, 4}
    assert {dict(t)["COLS"] for t in launched["verify_qmm"]} == {1, 2, 4}
    heads = {(dict(t)["D"], dict(t)["BITS"]) for t in launched["cascade_attention"]}
    assert heads == {(d, bits) for d in (64, 96, 128, 256) for bits in (0, 4, 8)} | {(80, 0)}
    assert {call.dtype for call in variants.calls()} == {"float32", "float16", "bfloat16"}


# What compiles them; the compiler is a stand-in

XCRUN = """#!{python}
import pathlib, sys
source = pathlib.Path(sys.argv[sys.argv.index("-c") + 1])
assert "-include" in sys.argv and "mlx/backend/metal/kernels/utils.h" in sys.argv
version = next(a for a in sys.argv if a.startswith("-std="))
if version == "-std=metal4.0":
    sys.exit("error: invalid value 'metal4.0'")
if "wrong" in source.read_text() and version == "-std=metal3.2":
    sys.exit(f"{{source}}:3:1: warning: odd\\n{{source}}:3:5: error: no such thing\\n  ^")
"""


def compile_in(folder: Path, path: str) -> subprocess.CompletedProcess:
    script = Path(__file__).parents[2] / "scripts" / "compile_metal.py"
    return subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_apples_compiler_gets_every_text_in_every_version_it_knows(tmp_path):
    tool, folder = tmp_path / "bin" / "xcrun", tmp_path / "texts"
    tool.parent.mkdir()
    folder.mkdir()
    tool.write_text(XCRUN.format(python=sys.executable))
    tool.chmod(0o755)
    (folder / "good.metal").write_text("right")
    done = compile_in(folder, str(tool.parent))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "metal4.0: left out, the compiler says: error: invalid value 'metal4.0'",
        "metal3.1: 1 of 1 compile",
        "metal3.2: 1 of 1 compile",
    ]
    (folder / "bad.metal").write_text("wrong")
    done = compile_in(folder, str(tool.parent))
    assert done.returncode == 1
    assert "metal3.1: 2 of 2 compile" in done.stdout
    assert "metal3.2: 1 of 2 compile\n  bad.metal: " in done.stdout
    assert "error: no such thing" in done.stdout


def test_nothing_to_compile_is_no_success(tmp_path):
    assert compile_in(tmp_path, "").returncode == 1
