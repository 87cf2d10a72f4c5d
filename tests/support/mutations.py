"""Damaged variants of JSON documents, safetensors files and any bytes, drawn from a seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

NESTED = "[" * 5000 + "]" * 5000
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, -(2**31), 7, 64, 97, 2**31 - 1, 2**31, 2**32, 2**40, 2**63,
    2**64, 10**30, 0.5, 1.0, -1.5, 1e-300, 1e308, float("nan"), float("inf"), "", "a", "64", "\0",
    "../../x", "ünï\ud83d", [], {}, [[]], [0], [1, 2, 3], [-1], [2**40], {"a": 1}, "full_attention",
    "sliding_attention", "linear", "yarn", "llama3", "F32", "BF16", "I64", "F8_E4M3", "F64",
    "x" * 3000,
]  # fmt: skip
KEYS = [
    "auto_map", "model_file", "quantization", "quantization_config", "text_config", "dflash_config",
    "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "dtype", "shape",
    "head_dim", "data_offsets", "__metadata__", "architectures", "attention_bias", "is_causal",
    "vocab_size", "block_size", "speculators_model_type", "partial_rotary_factor",
    "norm.weight", "",
]  # fmt: skip


def mutate_json(document: Any, random: Random) -> bytes:
    """A JSON document with one to three damages, at times broken as text as well."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_TREE)(document, random)
    text = json.dumps(document)
    if random.random() < 0.15:
        text = random.choice(_TEXT)(text, random)
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(data, random) if random.random() < 0.1 else data


def mutate_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file whose header, size field, data or any bytes are damaged."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    way = random.random()
    if way < 0.6:
        header = mutate_json(json.loads(header), random)
        size = len(header)
    elif way < 0.75:
        size = random.choice([0, 1, size - 1, size + 1, size + len(rest), 2**32, 2**63, 2**64 - 1,
                              random.randrange(2 * size)])  # fmt: skip
    elif way < 0.85:
        rest = mutate_bytes(rest, random)
    else:
        return mutate_bytes(data, random)
    return size.to_bytes(8, "little") + header + rest


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Some bytes flipped, removed, repeated or added; near the beginning more often."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = int(len(changed) * random.random() ** random.choice((1, 8)))
        way = random.randrange(6)
        if way == 0:
            del changed[at:]
        elif way == 1:
            del changed[at : at + random.randrange(1, 9)]
        elif way == 2:
            changed[at:at] = random.randbytes(random.randrange(1, 9))
        elif way == 3:
            changed[at : at + 8] = random.choice((b"\xff" * 8, bytes(8), b"\0\0\0\0\0\0\0\x80"))
        elif changed and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def _containers(document: Any) -> list[Any]:
    found = [document] if isinstance(document, dict | list) and document else []
    values = document.values() if isinstance(document, dict) else document
    for value in values if isinstance(document, dict | list) else ():
        found += _containers(value)
    return found


def _place(document: Any, random: Random) -> tuple[Any, Any]:
    """A container and a key or an index in it; (a new dict, "a") where there is none."""
    found = _containers(document)
    if not found:
        return {"a": 1}, "a"
    container = random.choice(found)
    keys = list(container) if isinstance(container, dict) else range(len(container))
    return container, random.choice(keys)


def _replace(document: Any, random: Random) -> None:
    container, key = _place(document, random)
    container[key] = copy.deepcopy(random.choice(VALUES))


def _remove(document: Any, random: Random) -> None:
    container, key = _place(document, random)
    del container[key]


def _near(document: Any, random: Random) -> None:
    container, key = _place(document, random)
    value = container[key]
    if isinstance(value, int | float):
        container[key] = random.choice((value + 1, value - 1, value * 2, value // 2, -value))
    elif isinstance(value, list) and value:
        container[key] = random.choice((value[:-1], value * 2, value[::-1], [*value, value[0]]))
    elif isinstance(value, str):
        container[key] = value[1:] + value[:1]


def _add(document: Any, random: Random) -> None:
    container, _ = _place(document, random)
    if isinstance(container, dict):
        container[random.choice(KEYS)] = copy.deepcopy(random.choice(VALUES))
    else:
        container.append(copy.deepcopy(random.choice(VALUES)))


def _empty(document: Any, random: Random) -> None:
    """Nothing is left of a part, or of the whole document."""
    if found := _containers(document):
        random.choice(found[: random.choice((1, len(found)))]).clear()


def _swap(document: Any, random: Random) -> None:
    (first, a), (second, b) = _place(document, random), _place(document, random)
    value = first[a], second[b]
    first[a], second[b] = copy.deepcopy(value[1]), copy.deepcopy(value[0])


def _twice(text: str, random: Random) -> str:
    """The first name of the document once more, with another value."""
    name = text[1 : text.find(":")] if text.startswith('{"') else '"a"'
    return f"{text[:-1]}, {name}: {json.dumps(random.choice(VALUES))}}}"


def _padded(text: str, random: Random) -> str:
    return random.choice((text + " " * 9, " " + text, text + "x", text + text, "\ufeff" + text, ""))


_TREE: list[Callable[[Any, Random], None]] = [
    _replace, _replace, _remove, _near, _near, _add, _empty, _swap,
]  # fmt: skip
_TEXT: list[Callable[[str, Random], str]] = [
    _twice,
    lambda text, random: text.replace(": ", f': {NESTED}, "a": ', 1),
    lambda text, random: text[: random.randrange(len(text))],
    _padded,
    lambda text, random: text.replace("1", "1" * random.choice((5, 30, 5000)), 1),
]
