"""Memory that a conversion takes: peaks of child processes on a synthetic model, a row per case.

    python scripts/measure_convert.py --gigabytes 4 --shards 8 --folder /tmp

The peak resident size is what the operating system accounts to the child in the end (ru_maxrss). It
counts pages of mapped files, such as libraries, as well; on Linux, the peak of anonymous memory
alone is sampled beside it, every 10 ms. Weights are not mapped: MLX reads them into buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

CASES = {
    "as it is": ["-m", "dflash_mlx.convert", "SRC", "DST"],
    "4 bits": ["-m", "dflash_mlx.convert", "SRC", "DST", "--bits", "4"],
}
BY_MLX_LM = {
    "mlx_lm.convert, as it is": [
        "-m",
        "mlx_lm",
        "convert",
        "--hf-path",
        "SRC",
        "--mlx-path",
        "DST",
    ],
}
WIDTH, HIDDEN, VOCABULARY = 4096, 11008, 32000


def model_config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{stem}.self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
        for name in ("gate", "up"):
            shapes[f"{stem}.mlp.{name}_proj.weight"] = (HIDDEN, WIDTH)
        shapes[f"{stem}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{stem}.{name}.weight"] = (WIDTH,)
    return {**shapes, "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def write_model(folder: Path, gigabytes: float, shards: int) -> int:
    """A llama in bfloat16 of about so many gigabytes; returns the size of its largest file."""
    per_layer = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)
    layers = round((gigabytes * 1e9 - 4 * VOCABULARY * WIDTH) / per_layer)
    (folder / "config.json").write_text(json.dumps(model_config(layers)))
    write_tokenizer(folder)
    noise = mx.array(np.random.default_rng(0).normal(size=WIDTH * 64)).astype(mx.bfloat16)
    shapes = tensor_shapes(layers)
    limit = sum(2 * int(np.prod(shape)) for shape in shapes.values()) / shards
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size > limit * len(files) - WIDTH * HIDDEN and len(files) < shards:
            files.append({})
        files[-1][name] = shape
        size += 2 * int(np.prod(shape))
    for i, names in enumerate(files, start=1):
        arrays = {name: fill(noise, shape) for name, shape in names.items()}
        mx.save_safetensors(str(folder / f"model-{i:05d}-of-{len(files):05d}.safetensors"), arrays)
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def fill(noise: mx.array, shape: tuple[int, ...]) -> mx.array:
    count = int(np.prod(shape))
    return mx.tile(noise, -(-count // noise.size))[:count].reshape(shape)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"<{i}>": i for i in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<1>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def measure(arguments: list[str]) -> dict[str, float]:
    """Run Python with these arguments; peaks in bytes, and seconds."""
    begin = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    anonymous = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        anonymous = max(anonymous, anonymous_memory(child.pid))
        time.sleep(0.01)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed with status {status}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_resident": usage.ru_maxrss * unit,
        "peak_anonymous": anonymous,
        "seconds": time.perf_counter() - begin,
    }


def anonymous_memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mlx-lm", action="store_true", help="measure mlx_lm.convert as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measure-convert-", dir=given.folder) as scratch:
        source, destination = Path(scratch, "source"), Path(scratch, "dst")
        source.mkdir()
        largest = write_model(source, given.gigabytes, given.shards)
        total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        print(f"{total / 1e9:.2f} GB of weights, largest file {largest / 1e9:.2f} GB")
        print(f"allowed: {(largest + 1e9) / 1e9:.2f} GB")
        for case, command in {**CASES, **(BY_MLX_LM if given.mlx_lm else {})}.items():
            places = {"SRC": str(source), "DST": str(destination)}
            found = measure([places.get(word, word) for word in command])
            print(
                f"{case}: peak resident {found['peak_resident'] / 1e9:.2f} GB, of it anonymous "
                f"{found['peak_anonymous'] / 1e9:.2f} GB, {found['seconds']:.0f} s",
                flush=True,
            )
            shutil.rmtree(destination)


if __name__ == "__main__":
    main()
