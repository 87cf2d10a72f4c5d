"""Damaged model folders, each loaded as users load it, in processes of their own.

`outcomes` runs such processes and goes on behind a case that ends one.

`python -m support.fuzzing SEED FIRST LAST` prints one JSON line for each case: its subject and what
became of it. A case may end as "refused" (DFlashError) or "loaded" with exactly the numbers that
are in its files; anything else is a fault. The process may not take more than GROWTH bytes beside
what it has when all is imported, nor may a case allocate more than its files justify.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from safetensors.numpy import load_file

from dflash_mlx import DFlashError
from dflash_mlx.cli.options import option_name
from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.models.check import check_drafter
from dflash_mlx.models.gguf_target import load_gguf
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.source import Source
from support import assistant_formats, assistants, gguf_files, reference_eagle3, reference_peagle
from support.drafter_formats import FORMATS, HALVES, version_1, write_shards
from support.families import FAMILIES, make_model
from support.hub_server import serve
from support.models import write_drafter, write_model, write_tokenizer
from support.mtp_targets import HEAD_SHARD, INDEX, write_split, write_target
from support.mutations import mutate_bytes, mutate_json, mutate_safetensors
from support.reference_dflash import random_drafter, write_drafter_folder

GOOD = ("refused", "loaded")
START, EACH = 120, 25  # seconds: imports, and a case, whose own alarm rings earlier
PROGRAM = ["-m", "support.fuzzing"]
GROWTH = 3 * 2**30  # bytes of address space
ALLOWED, FACTOR = 64 * 2**20, 64  # a case may allocate ALLOWED + FACTOR x the size of its files
SECONDS = 20  # a case that takes longer hangs

REPOSITORY = "owner/drafter"
CONFIG, WEIGHTS, TOKENS = "config.json", "model.safetensors", "tokenizer.json"

Files = dict[str, bytes]


@dataclass(frozen=True)
class Subject:
    """Something to damage. files: of a sound folder; damaged: one of them; load: as users do."""

    name: str
    files: Files
    damaged: str
    load: Callable[[Path], None]


class Hang(BaseException):
    """A case took too long."""


def outcomes(seed: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    """What became of each case, in order; "crash" where its process ended without a word."""
    while first < last:
        lines = _lines(seed, first, last)
        ended = [line for line in lines if "outcome" in line]
        yield from ended
        first += len(ended)
        if first < last:
            if not lines:
                raise RuntimeError("the fuzzing process did not begin; run it by hand")
            why = f"the process ended in case {first}"
            yield {"case": first, "subject": "", "outcome": "crash", "why": why}
            first += 1


def _lines(seed: int, first: int, last: int) -> list[dict[str, Any]]:
    command = [sys.executable, *PROGRAM, str(seed), str(first), str(last)]
    path = str(Path(__file__).parents[1])
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
    limit = START + EACH * (last - first)
    try:
        output = subprocess.run(
            command, env=environment, capture_output=True, timeout=limit, check=False
        ).stdout
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
    return [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]


def run(subjects: list[Subject], seed: int, case: int) -> dict[str, Any]:
    """One case and its outcome."""
    random = Random(f"{seed}/{case}")
    subject = random.choice(subjects)
    files = {**subject.files, subject.damaged: _damage(subject, random)}
    with _written(files) as folder:
        outcome = _outcome(subject, folder, ALLOWED + FACTOR * sum(map(len, files.values())))
    return {"case": case, "subject": subject.name, **outcome}


@contextmanager
def _written(files: Files) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name, contents in files.items():
            Path(folder, name).write_bytes(contents)
        yield Path(folder)


def _damage(subject: Subject, random: Random) -> bytes:
    contents = subject.files[subject.damaged]
    if subject.damaged.endswith(".json"):
        return mutate_json(json.loads(contents), random)
    if subject.damaged.endswith(".safetensors"):
        return mutate_safetensors(contents, random)
    return mutate_bytes(contents[:4096], random) + contents[4096:]


def _outcome(subject: Subject, folder: Path, allowed: int) -> dict[str, Any]:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(SECONDS)
    try:
        subject.load(folder)
        found = {"outcome": "loaded", "why": ""}
    except DFlashError as error:
        found = {
            "outcome": "refused",
            "why": _clear(error.told(option_name), folder, subject.damaged),
        }
        if found["why"].startswith("FAULT"):
            found["outcome"] = "unclear"
    except Hang:
        found = {"outcome": "hang", "why": ""}
    except BaseException as error:  # whatever it is, it is the finding
        found = {"outcome": type(error).__name__, "why": traceback.format_exc()[-1500:]}
    finally:
        signal.alarm(0)
    arrays = max(mx.get_peak_memory() - before, 0)  # the peak is 0 until something is allocated
    peak = tracemalloc.get_traced_memory()[1] + arrays
    tracemalloc.stop()
    return {**found, "outcome": "memory", "why": str(peak)} if peak > allowed else found


def _clear(sentence: str, folder: Path, damaged: str) -> str:
    """The sentence without the folder's name, or why it is none."""
    names = (str(folder), damaged or "no file", "--")
    wrong = {
        "more than one line": "\n" in sentence.strip(),
        "too long": len(sentence) > 1500,
        "no next step": "; " not in sentence,
        "no file, folder or option": not any(name in sentence for name in names),
    }
    if any(wrong.values()):
        return f"FAULT {[problem for problem in wrong if wrong[problem]]}: {sentence}"
    return sentence.replace(str(folder), "FOLDER")


def _ring(number: int, frame: FrameType | None) -> None:
    raise Hang


def load(folder: Path, model: Path | None = None, drafter: Path | None = None) -> None:
    """Damaged as the target, of a sound drafter or alone, or as the drafter of a sound `model`.

    Where both are sound, as the description of the pair. Numbers must be those of the files.
    """
    if model is not None and drafter is not None:
        (folder / "target").symlink_to(model)
        (folder / "drafter").symlink_to(drafter)
        names = [folder]
    else:
        names = [model or folder, *([drafter or folder] if model or drafter else [])]
    pair = load_pair(PairConfig(*map(str, names)), DecodeConfig())
    _same(pair.target.model, model or folder)
    if pair.drafters:
        _same(pair.drafters[0].module, drafter or folder)


def check_on_hub(repositories: dict[str, Path], folder: Path) -> None:
    """A drafter's head on a hub that serves `repositories`.

    It is judged as one here is, but that some damage is seen only once its file is fetched.
    """
    repositories[REPOSITORY] = folder
    there, here = check_drafter(Source(REPOSITORY)), check_drafter(folder)
    assert here.errors or not there.errors
    if "is damaged" not in str(here.findings):
        sentences = [str(finding).replace(str(folder), REPOSITORY) for finding in here.findings]
        assert [str(finding) for finding in there.findings] == sentences
    here.raise_first()


def check_head(folder: Path) -> None:
    """The head in a target's folder, read as a drafter."""
    facts = check_drafter(folder)
    facts.raise_first()
    assert facts.format is not None
    facts.format.load_network(folder, facts.config, mx.float32)


def read_gguf(folder: Path) -> None:
    """A GGUF file alone."""
    mx.eval(load_gguf(folder / "model.gguf")[0].parameters())


def _same(model: Any, folder: Path) -> None:
    """Raise AssertionError unless the model's numbers are those of the files."""
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, array in tree_flatten(model.parameters()):
        held, wanted = np.array(array, dtype=np.float64), stored[name].astype(np.float64)
        assert np.array_equal(held, wanted, equal_nan=True), name


def subjects(root: Path, repositories: dict[str, Path]) -> list[Subject]:
    """All that is damaged, made in `root`. repositories: those of a hub."""
    model, drafter = write_model(root / "model"), write_drafter(root / "drafter")
    formats = [FORMATS[name] for name in ("version 1", "version 2", HALVES, "dspark", "domino")]
    formats += [reference_eagle3.FORMATS["raw"], reference_peagle.FORMATS["raw"]]
    names = ("DFlash", "DFlash 2", "speculators", "DSpark", "Domino", "EAGLE-3", "P-EAGLE")
    drafters = {
        name: write_drafter_folder(root / name, *given)
        for name, given in zip(names, formats, strict=True)
    }
    shards = write_shards(root / "shards", version_1(), random_drafter(version_1()))
    gguf_files.write(root / "model.gguf")
    gguf = {"model.gguf": (root / "model.gguf").read_bytes()}
    tokenizer = write_drafter(root / "with a tokenizer")
    write_tokenizer(tokenizer)
    small = write_model(root / "small", make_model("qwen3"), **FAMILIES["qwen3"])
    as_drafter = partial(load, model=model)
    found = [
        Subject(f"{name} {damaged}", _files(folder), damaged, as_drafter)
        for name, folder in drafters.items()
        for damaged in (CONFIG, WEIGHTS)
    ]
    return [
        *found,
        *_read_in_parts(root),
        *(Subject(f"small {f}", _files(small), f, as_drafter) for f in (CONFIG, WEIGHTS, TOKENS)),
        Subject("drafter tokenizer.json", _files(tokenizer), TOKENS, as_drafter),
        Subject(
            "drafter on the hub", _files(drafter), WEIGHTS, partial(check_on_hub, repositories)
        ),
        Subject("index", _files(shards), "model.safetensors.index.json", as_drafter),
        *(Subject(f"target {f}", _files(model), f, load) for f in (CONFIG, WEIGHTS, TOKENS)),
        Subject("target of a pair", _files(model), CONFIG, partial(load, drafter=drafter)),
        Subject("GGUF", gguf, "model.gguf", read_gguf),
    ]


def _read_in_parts(root: Path) -> list[Subject]:
    """Heads and assistants, whose targets are of families of their own."""
    head, target = write_split(root / "head"), write_target(root / "without a head", {})
    assistant = write_drafter_folder(
        root / "assistant", assistant_formats.CASES["dense"][0], assistants.tensors("dense")
    )
    fields = assistant_formats.CASES["dense"][1]
    gemma = write_model(root / "gemma", assistants.make_target("dense").model, **fields)
    pairs = {"head": (head, target), "assistant": (assistant, gemma)}
    inside = write_target(root / "head inside")
    return [
        *(
            Subject(f"{name} {damaged}", _files(folder), damaged, partial(load, model=model))
            for name, (folder, model) in pairs.items()
            for damaged in (CONFIG, WEIGHTS)
        ),
        Subject("index of a head", _files(inside), INDEX, check_head),
        Subject("shard of a head", _files(inside), HEAD_SHARD, check_head),
    ]


def _files(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def limit_memory() -> None:
    """Let allocations beyond GROWTH fail; on Linux, where the system keeps to that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + GROWTH, resource.RLIM_INFINITY))


def main(seed: int, first: int, last: int) -> None:
    """Cases `first` to `last` - 1 of a seed."""
    with tempfile.TemporaryDirectory() as root, serve({}, Path(root) / "cache") as hub:
        all_subjects = subjects(Path(root), hub.repositories)
        for subject in all_subjects:  # sound, all load; this imports what loading imports
            with _written(subject.files) as folder:
                subject.load(folder)
        limit_memory()
        for case in range(first, last):
            print(json.dumps({"begin": case}), flush=True)
            print(json.dumps(run(all_subjects, seed, case)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
