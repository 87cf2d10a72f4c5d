"""How weights of each packing are taken from their words, by both kernels of verify_qmm."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.checks import FLOATS
from kernels_metal.emulator import emulated
from kernels_metal.verify_qmm import UNPACKED, VERIFY_QMM, Packing, Product
from support.kernels import each_is_found, exact, refused
from support.packings import (
    FLOATS_OF,
    INTEGERS,
    WAYS,
    dequantised,
    of,
    packed,
    product,
    told,
)


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        ({"bits": 6, "group": 32}, "group is 32, but must be one of 64"),
        ({"bits": 4, "group": 64, "mode": "mxfp4"}, "group is 64, but must be one of 32"),
        ({"bits": 8, "group": 16, "mode": "nvfp4"}, "bits is 8, but must be one of 4"),
        ({"bits": 4, "group": 32, "mode": "fp4"}, "mode is fp4, but must be one of affine, mxfp4"),
    ],
    ids=str,
)
def test_packings_that_mlx_or_the_kernels_do_not_have_are_refused(packing, said):
    with refused(said):
        Packing(**packing)


def test_arrays_that_a_packing_does_not_have_are_refused():
    weights, scales, _ = product(1, 64, 8, FLOATS_OF["mxfp4"])[1:4]
    plain = mx.zeros((8, 64))
    for packing, *arrays in (
        (FLOATS_OF["mxfp4"], weights, scales, scales),
        (FLOATS_OF["mxfp4"], weights, None, None),
        (Packing(4, 32), weights, scales, None),
        (UNPACKED, plain, scales, None),
    ):
        with refused("what comes with weights is"):
            Product(*arrays, packing)


def test_unpacked_weights_are_for_inputs_of_their_own_dtype():
    """Read as another dtype their bytes would be other numbers, of other places."""
    x, weights = mx.ones((2, 64), mx.bfloat16), mx.ones((8, 64))
    with refused("the dtype of x is bfloat16, but must be float32"):
        Product(weights, None, None, UNPACKED)(x)
    alike = VERIFY_QMM.case(x, weights.astype(x.dtype), None, None, UNPACKED)
    assert VERIFY_QMM.case(x, weights, None, None, UNPACKED) != alike


# Words are unpacked without shifts, so every bit of every word has to arrive where it belongs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", INTEGERS, ids=told)
@pytest.mark.parametrize("way", WAYS)
def test_every_bit_of_every_word_counts_for_its_weight_and_no_other(packing, dtype, way):
    bits, group = packing.bits, packing.group
    words = group * bits // 32
    single = np.zeros((words * 32, words), np.uint32)  # in each column one bit
    for bit in range(words * 32):
        single[bit, bit // 32] = 1 << bit % 32
    ones, zeros = (mx.full((words * 32, 1), value, dtype) for value in (1, 0))
    wanted = np.zeros((group, words * 32))
    for bit in range(words * 32):
        wanted[bit // bits, bit] = 2 ** (bit % bits)
    weights = Product(mx.array(single), ones, zeros, packing)
    x = mx.eye(group).astype(dtype)
    with emulated():
        found = [weights(x[at : at + 32], way) for at in range(0, group, 32)]
    np.testing.assert_array_equal(exact(mx.concatenate(found)), wanted)


@pytest.mark.parametrize("packing", [Packing(4, 32), Packing(6, 64), Packing(8, 32)], ids=told)
@pytest.mark.parametrize("way", WAYS)
def test_every_value_of_a_weight_is_exact_at_every_place_of_its_word(packing, way):
    values = np.arange(2**packing.bits)
    words = packed(np.repeat(values[:, None], packing.group, axis=1), packing.bits)
    ones, zeros = (mx.full((len(values), 1), value) for value in (1.0, 0.0))
    weights = Product(words, ones, zeros, packing)
    with emulated():
        found = weights(mx.eye(packing.group)[:32], way)
    np.testing.assert_array_equal(exact(found), np.broadcast_to(values, (32, len(values))))


@pytest.mark.parametrize("packing", FLOATS_OF.values(), ids=told)
@pytest.mark.parametrize("way", WAYS)
def test_every_float_at_every_place_is_what_its_format_and_mlx_say(packing, way):
    """Below scales up to the largest; of the 256 of 8 bits, two are no numbers."""
    codes = np.array([code for code in range(2**packing.bits) if code % 128 != 127])
    least, most = {"mxfp4": (4, 252), "nvfp4": (1, 126), "mxfp8": (20, 246)}[packing.mode]
    scales = most - np.arange(2 * len(codes) * 32 // packing.group) * 7 % (most - least)
    scales = mx.array(scales.reshape(len(codes), -1).astype(np.uint8))
    words = packed(np.repeat(codes[:, None], 64, axis=1), packing.bits)
    wanted = dequantised(words, scales, None, packing)
    mlx = mx.dequantize(words, scales, mode=packing.mode, dtype=mx.float32)
    np.testing.assert_array_equal(exact(mlx), wanted)
    weights = Product(words, scales, None, packing)
    with emulated():
        found = [weights(mx.eye(64)[at : at + 32], way) for at in (0, 32)]
    np.testing.assert_array_equal(exact(mx.concatenate(found)), wanted.T)


SIX, SIX_MATRIX = (of(Packing(6, 64), (rows, 320, 9)) for rows in (3, 9))
MX4, MX8 = (of(FLOATS_OF[mode], (3, 320, 9), (9, 320, 9)) for mode in ("mxfp4", "mxfp8"))
NV4, NV4_MATRIX = (of(FLOATS_OF["nvfp4"], (rows, 320, 9)) for rows in (3, 9))
PLAIN, PLAIN_MATRIX = (of(UNPACKED, (rows, 320, 9)) for rows in (3, 9))


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("verify_qmm", SIX, {
        "a weight that straddles two words": ("from[1] >> 8 | uint(from[2]) << 8",
            "from[1] >> 8", "result"),
        "weights of the next eight": ("eight * 3;", "eight * 4;", "result or bounds"),
    }),
    ("verify_qmm_matrix", SIX_MATRIX, {
        "the first weight that straddles two words": ("words[at] >> 24 | words[at + 1] << 8",
            "words[at] >> 24", "result"),
        "the second": ("words[at + 1] >> 16 | words[at + 2] << 16",
            "words[at + 1] >> 16", "result"),
        "bits of the word before": ("words[at + 2] >> 8", "words[at + 2] >> 7", "result"),
    }),
    ("lanes", MX4, {
        "a sign that is dropped": ("sign | (moved", "(moved", "result"),
        "a scale of half the size": ("bits << 23", "(bits - 1) << 23", "result"),
        "an exponent's bit of the neighbour": ("0x0E000E00u", "0x1E001E00u", "result"),
    }),
    ("lanes", MX8, {
        "halves that change places": ("(b & 0xFFFF0000u)", "b << 16", "result"),
        "a mantissa's bit is lost": ("0x3F803F80u", "0x3F003F00u", "result"),
    }),
    ("verify_qmm", MX4, {
        "the scale of another group": ("(k >> group_shift);",
            "(k >> group_shift) % 3;", "result"),
        "a scale without its power of two": ("16384.0f : 256", "8192.0f : 256", "result"),
    }),
    ("verify_qmm_matrix", MX8, {
        "the scale of another group": ("const uint place = places[j] + g;",
            "const uint place = places[j];", "result"),
        "a scale without its power of two": ("16384.0f : 256", "16384.0f : 128", "result"),
    }),
    ("verify_qmm_matrix", NV4_MATRIX, {
        "the first of two scales twice": ("* 2 + c / 4]", "* 2]", "result"),
        "scales do not count": ("          pair *= own[j];\n", "", "result"),
        "scales count twice": ("FORM == 2 ? 1.0f : scale",
            "FORM == 9 ? 1.0f : scale", "result"),
    }),
    ("lanes", NV4, {
        "a scale read as the other kind": ("FORM == 1 ? as_type", "FORM != 0 ? as_type", "result"),
    }),
    ("verify_qmm", PLAIN, {
        "a weight twice": ("from[j / 4][j % 4]", "from[j / 4][j % 2]", "result"),
    }),
    ("verify_qmm_matrix", PLAIN_MATRIX, {
        "weights of the first four twice": ("c * 4 + i % 2 * 4", "c * 4", "result"),
        "x of the first group": ("x + x_at[i] + g * GROUP);\n    }\n    #",
            "x + x_at[i]);\n    }\n    #", "result"),
    }),
)
# fmt: on
