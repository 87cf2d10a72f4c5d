"""Conversations go on after a restart; no file, however damaged, changes a token."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine import prefix_files
from dflash_mlx.engine.prefix_files import CacheKey, PrefixFiles, weights_digest
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.state import State
from dflash_mlx.session.session import Session, collect
from dflash_mlx.verifier.model import Target
from support.decoding import start
from support.families import make_model
from support.hybrids import plain_answer
from support.mutations import mutate_safetensors
from support.pairs import full_pair
from support.toys import Letters, prompt_of

ROOT = Path(__file__).parents[2]
STEPPING = ("eagle3", "mtp", "lm")
RESTARTS = [("llama", m) for m in ("none", "dflash", "d2sd", *STEPPING, "specdiff")]
RESTARTS += [("llama_sliding", "d2sd"), ("falcon_h1", "d2sd")]
LIMIT = 10**9
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def any_disk(monkeypatch):
    """However full it is."""
    monkeypatch.setattr(prefix_files, "SPARE", 0)


def llama() -> Target:
    return Target(make_model("llama"), 4096, "llama")


def write(files: PrefixFiles, target: Target, seed: int = 0) -> State:
    """A state of 40 tokens that was written."""
    state = start(target, NoDraft(), prompt_of(seed, 40))
    assert files.write(CacheKey.of(target, NoDraft(), state), state), files.problem
    return state


def kept(folder: Path, target: Target) -> State:
    """A state that was written, and nothing else of it is in memory."""
    return write(PrefixFiles(folder, LIMIT, worth=8), target)


def found(files: PrefixFiles, target: Target, prompt: list[int]) -> State | None:
    def empty() -> State:
        return State(target.new_cache(), NoDraft().new_context())

    return files.find(CacheKey.of(target, NoDraft(), empty()), Prompt.of(prompt), 0, empty)


@pytest.mark.parametrize(("name", "method"), RESTARTS)
def test_after_a_restart_a_conversation_goes_on_and_says_what_it_would(tmp_path, name, method):
    """Each time the models are loaded anew, and nothing is left but the folder."""

    def session() -> Session:
        pair = full_pair(tmp_path / "pair", Target(make_model(name), 4096, name), Letters())
        prefixes = PrefixCache(LIMIT, PrefixFiles(tmp_path / "kept", LIMIT))
        return Session(pair, DecodeConfig(method, max_tokens=12), prefixes)

    first, prompt = session(), prompt_of(0, 300)
    said = [*prompt, *collect(first.stream(prompt)).tokens]
    first.prefixes.save()
    for turn in (1, 2):
        later, question = session(), [*said, *prompt_of(turn, 9)]
        answer = collect(later.stream(question))
        assert list(answer.tokens) == plain_answer(later.pair.target, question, 12)
        assert answer.statistics.reused_tokens >= 0.95 * len(said)
        later.prefixes.save()
        said = [*question, *answer.tokens]
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_what_leaves_memory_goes_to_the_disk_and_comes_back(tmp_path):
    target, prefixes = llama(), PrefixCache(0, PrefixFiles(tmp_path, LIMIT, worth=8))
    prompts = [prompt_of(seed, 40) for seed in range(3)]
    for prompt in prompts:
        prefixes.put(start(target, NoDraft(), prompt), target, NoDraft())
    # A greeting in common does not take a long conversation from memory unsaved.
    other = [*prompts[2][:6], *prompt_of(9, 30)]
    assert prefixes.take(other, target, NoDraft()).reuse(Prompt.of(other)) == 6
    assert prefixes.nbytes == 0
    for prompt in prompts:
        again = prefixes.take([*prompt, 1], target, NoDraft())
        assert again.reuse(Prompt.of([*prompt, 1])) == 40


def test_only_its_owner_may_read_what_was_said(tmp_path):
    folder = tmp_path / "cache" / "prefixes"
    kept(folder, llama())
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
    assert modes == [0o700, 0o600]


def test_a_thousand_damaged_files_change_no_token_and_are_removed(tmp_path):
    target = llama()
    state, prompt = kept(tmp_path, target), [*prompt_of(0, 40), 1]
    (file,) = tmp_path.iterdir()
    data, random, removed = file.read_bytes(), Random(0), 0
    files = PrefixFiles(tmp_path, LIMIT, worth=8)
    for case in range(1000):
        damaged = mutate_safetensors(data, random)
        file.write_bytes(damaged)
        back = found(files, target, prompt)
        if back is None:
            assert not file.exists(), case
            removed += 1
        else:  # a header that says the same in other words
            assert back.tokens == state.tokens
            for ours, theirs in zip(back.saved()[0], state.saved()[0], strict=True):
                assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), case
    assert removed > 900
    file.write_bytes(data)
    assert found(files, target, prompt).tokens == state.tokens


def altered(file: Path, digests: bool = True, **metadata: str) -> None:
    """Write a file again with other metadata, and digests to match."""
    arrays, told = mx.load(str(file), return_metadata=True)
    mx.eval(arrays)
    told |= metadata
    if digests:
        told["digest"] = prefix_files._digest(told, arrays)
    mx.save_safetensors(str(file), arrays, told)


def test_files_of_other_versions_and_foreign_ones_are_removed(tmp_path):
    target = llama()
    kept(tmp_path, target)
    (file,) = tmp_path.iterdir()
    altered(file, versions=json.dumps({"mlx": "0.1"}))
    (tmp_path / "foreign.safetensors").write_bytes(file.read_bytes()[:100])
    mx.save_safetensors(str(tmp_path / "theirs.safetensors"), {"weight": mx.zeros(3)})
    PrefixFiles(tmp_path, LIMIT)
    assert not any(tmp_path.iterdir())


def test_a_file_that_goes_by_the_name_of_another_models_is_not_used(tmp_path):
    target, other = llama(), Target(make_model("llama", seed=1), 4096, "llama")
    prompt = [*prompt_of(0, 40), 1]
    kept(tmp_path, other)
    (file,) = tmp_path.iterdir()
    files = PrefixFiles(tmp_path, LIMIT, worth=8)
    assert found(files, target, prompt) is None and file.exists()
    key = files._key(CacheKey.of(target, NoDraft(), start(target, NoDraft(), [1])))
    name = file.with_name(f"{key}-{file.name.partition('-')[2]}")
    file.rename(name)
    assert found(files, target, prompt) is None and not name.exists()


@pytest.mark.parametrize("change", ["a weight", "an argument", "bits", "two weights in turn"])
def test_no_other_model_has_the_same_fingerprint(change):
    def key(target: Target) -> str:
        state = State(target.new_cache(), NoDraft().new_context())
        return CacheKey.of(target, NoDraft(), state).fingerprint()

    target, same = llama(), llama()
    assert key(target) == key(same)
    layers = same.model.model.layers
    weight = layers[0].self_attn.q_proj.weight
    if change == "a weight":
        weight[3, 5] += 1e-6
    elif change == "two weights in turn":
        weight[3, 5], weight[3, 6] = weight[3, 6], weight[3, 5]
    elif change == "an argument":
        same.model.args.rope_theta *= 2
    else:
        same.kv_bits = 8
    assert key(target) != key(same)


def test_weights_of_any_type_and_shape_have_a_digest():
    types = (mx.float32, mx.bfloat16, mx.uint8, mx.int64, mx.bool_)
    named = [
        (str(i), mx.ones(shape, t)) for t in types for i, shape in enumerate([(), 3, (2, 3, 5)])
    ]
    digests = {weights_digest(named[:i]) for i in range(len(named))}
    assert len(digests) == len(named)


def test_the_disk_holds_no_more_than_the_limit_the_last_used_ones(tmp_path):
    target = llama()
    kept(tmp_path, target)
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    files, state = PrefixFiles(tmp_path, int(3.5 * size), worth=8), None
    for seed in range(1, 6):
        os.utime(file, (2e9, 2e9))  # it was used just now
        state = write(files, target, seed)
        for age, each in enumerate(sorted(set(tmp_path.iterdir()) - {file}, key=os.path.getmtime)):
            os.utime(each, (1e9 + age, 1e9 + age))
    there = [bool(found(files, target, [*prompt_of(seed, 40), 1])) for seed in range(6)]
    assert there == [True, False, False, False, True, True]
    assert not PrefixFiles(tmp_path, size // 2, worth=8).write(
        CacheKey.of(target, NoDraft(), state), state
    )


def test_two_programs_share_a_folder(tmp_path):
    target, prompt = llama(), [*prompt_of(0, 40), 1]
    ours, theirs = (PrefixFiles(tmp_path, LIMIT, worth=8) for _ in range(2))
    write(theirs, target)
    assert found(ours, target, prompt).tokens == prompt[:-1]
    theirs.clear()
    assert found(ours, target, prompt) is None


WRITES = """
import os, signal, sys
from pathlib import Path
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine import prefix_files
from dflash_mlx.engine.prefix_files import CacheKey
from support.decoding import start
from support.families import make_model
from support.toys import prompt_of
from dflash_mlx.verifier.model import Target

prefix_files.SPARE = 0
target = Target(make_model("llama"), 4096, "llama")
files = prefix_files.PrefixFiles(Path(sys.argv[1]), 10**9, worth=8)
for seed in (0, 1):
    state = start(target, NoDraft(), prompt_of(seed, 40))
    assert files.write(CacheKey.of(target, NoDraft(), state), state), files.problem
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_that_is_killed_while_it_writes_leaves_what_it_had_written(tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-c", WRITES, tmp_path], env=environment, timeout=120)
    assert run.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".new-*"))) == 1
    own = tmp_path / f".new-{os.getpid()}-under-way.safetensors"
    own.touch()
    files, target = PrefixFiles(tmp_path, LIMIT, worth=8), llama()
    assert list(tmp_path.glob(".new-*")) == [own], "who still writes goes on"
    assert found(files, target, [*prompt_of(0, 40), 1]).position == 40
    assert found(files, target, [*prompt_of(1, 40), 1]) is None


@pytest.mark.parametrize("way", ["a file in its place", "full", "nearly full"])
def test_where_nothing_can_be_kept_one_sentence_says_so(tmp_path, monkeypatch, way):
    folder, target = tmp_path / "kept", llama()
    if way == "a file in its place":
        folder.touch()
    elif way == "nearly full":
        monkeypatch.setattr(prefix_files, "SPARE", 10**18)
    else:

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(prefix_files, "replace_safetensors", full)
    prefixes = PrefixCache(LIMIT, PrefixFiles(folder, LIMIT, worth=8))
    for seed in range(2):
        prefixes.put(start(target, NoDraft(), prompt_of(seed, 40)), target, NoDraft())
    problem = prefixes.save()
    assert str(folder) in problem and problem.endswith("after a restart")
    assert prefixes.take([*prompt_of(0, 40), 1], target, NoDraft()).position == 40


@pytest.mark.parametrize("about", ["[]", "[[1]]", "{}", "0", "[[1, [[0, 5]]]]"])
def test_a_file_that_says_something_else_of_itself_is_removed(tmp_path, about):
    target = llama()
    kept(tmp_path, target)
    (file,) = tmp_path.glob("*.safetensors")
    arrays, said = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), dict(arrays), {**said, "about": about})
    assert found(PrefixFiles(tmp_path, LIMIT, worth=8), target, prompt_of(0, 40)) is None
    assert not file.exists()
