"""What was raced on a machine is kept, and found again by the next session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.verifier import routing
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Kernels, kernel_choices
from kernels_metal import dispatch
from kernels_metal.cascade_attention import CASCADE_ATTENTION
from kernels_metal.dispatch import CALLS, Choice
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.emulator import Run, emulated
from support.families import make_model
from support.kernels import clock

FASTER = Choice(True, f"faster: 1000 us against 2000 us, in chains of {CALLS}")
RACE = 1.0, 2.0
CASE = "draft_head/2/9x3/32/float32/"


class Safe:
    """A watchdog that lets everything pass, or refuses with this reason."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.settled = 0

    def is_trying(self) -> bool:
        return False

    def refusal(self, operation, args) -> str:
        return self.reason


@pytest.fixture(autouse=True)
def metal(monkeypatch) -> Iterator[Run]:
    """As if MLX ran kernels here: the emulator stands for Metal; nothing is tried in a child."""
    monkeypatch.setattr(routing, "Watchdog", lambda folder, keep, later: Safe())
    with emulated() as run:
        monkeypatch.setattr(routing, "metal", run)
        monkeypatch.setattr(dispatch, "metal", run)
        yield run


def session(folder: Path, *steps: float, name: str = "tiny", mode: str = "auto") -> Kernels:
    """The kernels of a newly loaded model. steps: milliseconds of a call, by kernel and stock."""
    made = Kernels(name, lambda: [("weight", mx.zeros(3))], folder, clock(*steps))
    made.switch(mode)
    return made


def ask(kernels: Kernels, rows: int = 2) -> bool:
    """Whether the kernel was taken."""
    return kernels.run(DRAFT_HEAD, mx.arange(rows * 9.0).reshape(rows, 9), 3) is not None


def stored(folder: Path) -> dict[str, Choice]:
    (found,) = kernel_choices(folder).values()
    return found


def test_a_race_is_kept_and_the_next_session_does_not_race_again(tmp_path):
    first = session(tmp_path, 1.0, 2.0, 1.0, 2.0)
    assert ask(first)
    assert list(first.choices.values()) == [FASTER]
    assert stored(tmp_path) == first.choices
    (key,) = first.choices
    assert key.startswith(CASE)

    second = session(tmp_path)
    assert ask(second)
    assert second.choices == first.choices
    with pytest.raises(StopIteration):  # it has to race again
        ask(second, rows=9)
    ask(first, rows=9)  # a new case joins the file
    assert len(stored(tmp_path)) == 2
    assert ask(session(tmp_path), rows=9)


def test_a_slower_kernel_is_not_taken_by_the_next_session_either(tmp_path):
    assert not ask(session(tmp_path, 1.0, 0.5))
    assert not ask(session(tmp_path))
    (choice,) = stored(tmp_path).values()
    assert choice.reason.startswith("not faster: ")


def test_what_a_trial_process_refused_is_not_taken_until_that_is_forgotten(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(routing, "Watchdog", lambda folder, keep, later: Safe("hangs"))
        kernels = session(tmp_path)
        assert not ask(kernels)
        assert list(kernels.choices.values()) == [Choice(False, "hangs")]
    assert kernel_choices(tmp_path) == {}
    assert ask(session(tmp_path, *RACE))


def test_models_share_no_choices(tmp_path):
    ask(session(tmp_path, *RACE))
    ask(session(tmp_path, *RACE, name="another"))
    assert sorted(kernel_choices(tmp_path)) == ["another", "tiny"]
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("mode", ["on", "off"])
def test_what_was_not_raced_is_neither_kept_nor_read(tmp_path, mode):
    kernels = session(tmp_path / "none", mode=mode)
    assert ask(kernels) == (mode == "on")
    assert not (tmp_path / "none").exists()


def test_off_makes_a_model_forget_and_auto_remembers(tmp_path):
    kernels = session(tmp_path, *RACE)
    ask(kernels)
    kernels.switch("off")
    assert kernels.choices == {} and not ask(kernels)
    kernels.switch("auto")
    assert ask(kernels)


def damages() -> dict[str, str | bytes]:
    made = {"made with": dispatch.fingerprint(), "model": "tiny"}
    return {
        "no text": b"\xff\xfe\x00",
        "a list": "[]",
        "without a model": json.dumps({"made with": dispatch.fingerprint(), "choices": {}}),
        "choices in a list": json.dumps({**made, "choices": [1]}),
        "no choice": json.dumps({**made, "choices": {CASE: 1}}),
        "half a choice": json.dumps({**made, "choices": {CASE: {"kernel": True}}}),
        "no words": json.dumps({**made, "choices": {CASE: {"kernel": 1, "reason": 2}}}),
        "other kernels": json.dumps({**made, "made with": "0", "choices": {CASE: vars(FASTER)}}),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_or_outdated_file_is_raced_anew_and_replaced(tmp_path, damage):
    ask(session(tmp_path, *RACE))
    (file,) = tmp_path.glob("*.json")
    found = damages()[damage]
    file.write_bytes(found if isinstance(found, bytes) else found.encode())
    assert kernel_choices(tmp_path) == {}
    kernels = session(tmp_path, *RACE)
    assert ask(kernels)
    assert stored(tmp_path) == kernels.choices
    assert ask(session(tmp_path))


def test_choices_that_cannot_be_kept_hold_for_the_session(tmp_path):
    (tmp_path / "file").write_text("")
    kernels = session(tmp_path / "file", *RACE)
    assert ask(kernels) and ask(kernels)
    assert list(kernels.choices.values()) == [FASTER]
    assert kernel_choices(tmp_path / "file") == {}


def test_a_loaded_model_keeps_its_choices_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "default_folder", lambda: tmp_path)
    target = Target(make_model("llama"), 200, "tiny llama")
    target.use_kernels("auto")
    target.forward(mx.arange(4), target.new_cache(), Block(4))
    found = kernel_choices()
    assert found == {"tiny llama": target.kernels.choices}
    (key,) = (each for each in found["tiny llama"] if each.startswith(CASCADE_ATTENTION.name))
    others = {each.partition("/")[0] for each in found["tiny llama"].keys() - {key}}
    assert others == {"verify_qmm"}, "products by weights that are not packed"
    assert "the head dim of queries is 16" in found["tiny llama"][key].reason
