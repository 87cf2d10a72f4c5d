"""What the name of a model tells of its size."""

import pytest

from dflash_mlx.models.memory import bits_of, loaded_bytes, stored_bytes, weights_of
from dflash_mlx.models.registry import entries

NAMES = {
    "Qwen/Qwen3-4B": (4e9, 16),
    "mlx-community/Qwen3-4B-4bit": (4e9, 4),
    "someone/Qwen3-8B-MLX-8-bit": (8e9, 8),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30e9, 16),
    "openai/gpt-oss-20b-MXFP4-Q8": (20e9, 4),
    "meta-llama/Llama-3.1-8B-Instruct": (8e9, 16),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (135e6, 16),
    "moonshotai/Kimi-K2.5": (0, 16),
    "z-lab/Qwen3-4B-DFlash-b16": (4e9, 16),
    "/models/gemma-4-12B-it-bf16/": (12e9, 16),
    "./Qwen3-0.6B-float32": (0.6e9, 32),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_tells_how_many_weights_there_are_and_their_bits(name):
    assert (weights_of(name), bits_of(name)) == NAMES[name]


def test_what_a_name_does_not_tell_can_be_said():
    assert weights_of("moonshotai/Kimi-K2.5", 1000) == 1e12


def test_every_target_of_the_registry_has_a_size():
    assert all(weights_of(entry.name, entry.billions) > 1e8 for entry in entries())


def test_weights_take_their_bits_and_scales_on_disk_and_32_bits_on_a_cpu():
    assert stored_bytes(8e9, 4) == 4_500_000_000
    assert stored_bytes(8e9, 16) == 16_000_000_000
    assert loaded_bytes(16e9, 16, on_cpu=False) == pytest.approx(1.15 * 16e9)
    four, sixteen = loaded_bytes(4.5e9, 4, on_cpu=True), loaded_bytes(16e9, 16, on_cpu=True)
    assert four == pytest.approx(sixteen) == pytest.approx(1.15 * 32e9)
