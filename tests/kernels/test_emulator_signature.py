"""The signature that the emulator puts around a body is the one MLX prints."""

import itertools
from pathlib import Path

import mlx.core as mx
import pytest

from kernels_metal import factory
from kernels_metal.catalog import OPERATIONS
from kernels_metal.checks import FLOATS
from kernels_metal.emulator.signature import ATTRIBUTES, CONSTANT_BELOW, signature
from kernels_metal.factory import Kernel, Launch
from kernels_metal.sweep import trials
from support.kernels import Sample, arguments, check_signature, launches, printed_by_mlx


def sample_of(folder: Path, body: str, inputs, header: str = "", **settings) -> Sample:
    kernel = {k: settings.pop(k) for k in ("atomic_outputs",) if k in settings}
    (folder / "tiny.metal").write_text(body)
    (folder / "head.metal").write_text(header)
    names = tuple("abcdefgh"[: len(inputs)])
    outputs = settings.pop("output_dtypes", (mx.float32,))
    results = tuple("opq"[: len(outputs)])
    plan = Launch((1, 1, 1), (1, 1, 1), ((4,),) * len(outputs), outputs, **settings)
    return Sample(
        Kernel("tiny", names, results, "head" if header else None, folder=folder, **kernel),
        tuple(inputs),
        plan,
    )


SMALL = {  # inputs below 8 elements, which MLX passes as `constant`
    "cascade_attention": {"rows": 1, "prefix": 2, "heads": 1, "kv_heads": 1},
    "draft_head": {"rows": 1, "vocabulary": 7, "k": 4},
    "verify_qmm": {"rows": 2, "depth": 32, "columns": 1, "group": 32},
}


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_kernels_have_the_signature_of_mlx_in_calls_of_all_kinds(made, capfd, tmp_path):
    calls = [trial.arguments for trial in trials(0, 90) if trial.operation is made]
    calls += [arguments(made, dtype, **SMALL.get(made.name, {})) for dtype in FLOATS]
    samples = {}
    for sample in (sample for call in calls for sample in launches(made, *call)):
        few = tuple(array.size < CONSTANT_BELOW for array in sample.inputs)
        samples[sample.kernel.name, sample.plan.template, few] = sample
    for sample in samples.values():
        check_signature(sample, capfd, tmp_path)
    assert {name for name, _, _ in samples} == {kernel.name for kernel in made.kernels}


DTYPES = [
    mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64,
    mx.float16, mx.bfloat16, mx.float32, mx.complex64,
]  # fmt: skip


def test_all_types_of_inputs_outputs_and_templates(capfd, tmp_path):
    for dtype in DTYPES:
        sample = sample_of(
            tmp_path, "o[0] = 0;", [mx.zeros((9,), dtype)], output_dtypes=(dtype, mx.int8),
            template=(("T", dtype), ("N", 3), ("M", -12), ("B", True), ("C", False)),
        )  # fmt: skip
        check_signature(sample, capfd, tmp_path)


def test_both_sides_of_the_limit_of_constant_inputs_and_scalars(capfd, tmp_path):
    body = "a_shape; a_strides; a_ndim; b_shape; c_ndim; d_shape;"
    below, at = mx.zeros((CONSTANT_BELOW - 1,)), mx.zeros((CONSTANT_BELOW,))
    inputs = [below, at, mx.array(1.0), mx.zeros((0, 3)), mx.zeros((2, 4)), mx.zeros((7, 1))]
    sample = sample_of(tmp_path, body, inputs)
    text = signature(sample.kernel, sample.inputs, sample.plan)
    assert "const constant float* a " in text and "const device float* b " in text
    assert "const constant float& c " in text
    check_signature(sample, capfd, tmp_path)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_each_attribute_that_the_body_names(name, capfd, tmp_path):
    check_signature(sample_of(tmp_path, f"uint x = {name};", [mx.zeros((9,))]), capfd, tmp_path)


def test_all_attributes_headers_atomic_outputs_and_no_template(capfd, tmp_path):
    body = " ".join(f"{name};" for name in ATTRIBUTES) + "\n"
    for header, atomic in itertools.product(["", "// one\nconstant int x = 1;\n"], [False, True]):
        sample = sample_of(tmp_path, body, [mx.zeros((9,))], header, atomic_outputs=atomic)
        check_signature(sample, capfd, tmp_path)
        factory._compiled.cache_clear()  # the file changes under the same name


def test_a_changed_signature_is_noticed(capfd, tmp_path):
    sample = sample_of(tmp_path, "o[0] = a[0];", [mx.zeros((9,))])
    other = sample_of(tmp_path, "o[0] = a[0];", [mx.zeros((7,))])
    assert signature(other.kernel, other.inputs, other.plan) != printed_by_mlx(
        sample, capfd, tmp_path
    )
