"""The signature that the emulator puts around a body is the one MLX prints."""

import mlx.core as mx
import pytest

from kernels_metal import factory
from kernels_metal.catalog import OPERATIONS
from kernels_metal.checks import FLOATS
from kernels_metal.emulator.signature import ATTRIBUTES, CONSTANT_BELOW, signature
from kernels_metal.factory import TYPES
from support.emulator_tiny import tiny
from support.kernels import Sample, arguments, launches, random_calls


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
