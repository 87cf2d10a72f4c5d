"""The signature that the emulator puts around a body is, letter for letter, the one MLX prints."""

import itertools
from pathlib import Path

import mlx.core as mx
import pytest

from kernels_metal.catalog import CATALOG, Sample
from kernels_metal.emulator.signature import ATTRIBUTES, CONSTANT_BELOW, signature
from kernels_metal.factory import SOURCE, Kernel, Launch, call


def printed_by_mlx(sample: Sample, capfd, folder: Path) -> str:
    """MLX prints while a graph with the kernel is traced; nothing is computed."""

    def traced(*inputs: mx.array) -> list[mx.array]:
        return call(sample.kernel, inputs, sample.plan, verbose=True)

    capfd.readouterr()
    mx.export_function(str(folder / "traced.mlxfn"), traced, *sample.inputs)
    text = capfd.readouterr().out
    return text.partition("```\n")[2].rpartition("\n```")[0]


def check(sample: Sample, capfd, folder: Path) -> None:
    ours = signature(sample.kernel, sample.inputs, sample.plan)
    assert ours == printed_by_mlx(sample, capfd, folder)


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


@pytest.mark.parametrize("name", CATALOG)
def test_kernel_has_the_signature_of_mlx_in_every_sample_launch(name, capfd, tmp_path):
    count = 0
    for sample in CATALOG[name].samples():
        check(sample, capfd, tmp_path)
        count += 1
    assert count


def test_every_source_file_is_a_body_or_header_of_the_catalog():
    kernels = [next(iter(entry.samples())).kernel for entry in CATALOG.values()]
    used = {k.path for k in kernels} | {k.header_path for k in kernels if k.header_path}
    assert used == set(SOURCE.glob("*.metal"))


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
        check(sample, capfd, tmp_path)


def test_both_sides_of_the_limit_of_constant_inputs_and_scalars(capfd, tmp_path):
    body = "a_shape; a_strides; a_ndim; b_shape; c_ndim; d_shape;"
    below, at = mx.zeros((CONSTANT_BELOW - 1,)), mx.zeros((CONSTANT_BELOW,))
    inputs = [below, at, mx.array(1.0), mx.zeros((0, 3)), mx.zeros((2, 4)), mx.zeros((7, 1))]
    sample = sample_of(tmp_path, body, inputs)
    text = signature(sample.kernel, sample.inputs, sample.plan)
    assert "const constant float* a " in text and "const device float* b " in text
    assert "const constant float& c " in text
    check(sample, capfd, tmp_path)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_each_attribute_that_the_body_names(name, capfd, tmp_path):
    check(sample_of(tmp_path, f"uint x = {name};", [mx.zeros((9,))]), capfd, tmp_path)


def test_all_attributes_headers_atomic_outputs_and_no_template(capfd, tmp_path):
    body = " ".join(f"{name};" for name in ATTRIBUTES) + "\n"
    for header, atomic in itertools.product(["", "// one\nconstant int x = 1;\n"], [False, True]):
        sample = sample_of(tmp_path, body, [mx.zeros((9,))], header, atomic_outputs=atomic)
        check(sample, capfd, tmp_path)
        call.__globals__["_compiled"].cache_clear()  # the file changes under the same name


def test_a_changed_signature_is_noticed(capfd, tmp_path):
    sample = sample_of(tmp_path, "o[0] = a[0];", [mx.zeros((9,))])
    other = sample_of(tmp_path, "o[0] = a[0];", [mx.zeros((7,))])
    assert signature(other.kernel, other.inputs, other.plan) != printed_by_mlx(
        sample, capfd, tmp_path
    )
