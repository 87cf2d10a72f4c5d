"""Kernels are tried beside the first rounds, watched in their first passes, and turned off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from dflash_mlx import doctor
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine import step, verify
from dflash_mlx.engine.pair import Pair
from dflash_mlx.verifier import in_use, pass_times, routing
from dflash_mlx.verifier.pass_times import PassTimes, noticed
from dflash_mlx.verifier.routing import Kernels, kernel_choices
from kernels_metal import dispatch, watchdog
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.emulator import Run, emulated
from support.decoding import finish, scheduler_of, sequence_of
from support.hybrids import changed_target
from support.kernels import clock

ROWS = 2
SMALL = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


class Tries(watchdog.Trials):
    """Stands for the process that tries kernels: says `wrong` once it is let."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.asked = wrong, 0

    def __call__(self, given: str) -> str:
        self.asked += 1
        return self.wrong


@pytest.fixture(autouse=True)
def metal(monkeypatch) -> Iterator[Run]:
    """The emulator stands for Metal."""
    with emulated() as run:
        monkeypatch.setattr(routing, "metal", run)
        monkeypatch.setattr(dispatch, "metal", run)
        yield run


def session(folder: Path, tries: Tries | None = None, *steps: float) -> Kernels:
    """The kernels of a newly loaded model; races are won."""
    steps = steps or (1.0, 2.0) * 4
    made = Kernels("tiny", lambda: [("weight", mx.zeros(3))], folder, clock(*steps))
    made.trials = tries or Tries()
    made.switch("auto")
    return made


def taken(kernels: Kernels, rows: int = ROWS) -> bool:
    return kernels.run(DRAFT_HEAD, mx.arange(rows * 9.0).reshape(rows, 9), 3) is not None


def settled(folder: Path, tries: Tries | None = None) -> Kernels:
    """Kernels whose one operation was tried, raced and taken."""
    kernels = session(folder, tries)
    taken(kernels)
    kernels.wait()
    assert kernels.begin_round() and taken(kernels)
    return kernels


def marks(folder: Path) -> list[Path]:
    return [*(folder / "in-use").glob("*")]


# Tried beside the first rounds


def test_decoding_begins_with_stock_and_what_was_tried_holds_from_the_next_round_on(tmp_path):
    tries = Tries()
    kernels = session(tmp_path, tries)
    assert kernels.begin_round()
    held = kernels.running()
    assert not taken(kernels)
    (choice,) = kernels.choices.values()
    assert choice.reason == watchdog.TRYING
    kernels._watchdog.wait(20)
    assert kernels.running() is held  # in this round nothing changes
    kernels.begin_round()
    assert kernels.running() is not held
    assert taken(kernels) and tries.asked == 1
    (choice,) = kernels.choices.values()
    assert choice.kernel and "faster" in choice.reason
    again = kernels.running()
    kernels.begin_round()
    assert kernels.running() is again


def test_what_failed_its_try_stays_with_stock_and_is_not_tried_again(tmp_path):
    kernels = session(tmp_path, Tries("hangs"))
    taken(kernels)
    kernels.wait()
    assert not taken(kernels) and not kernels.is_watched
    tries = Tries()
    assert not taken(session(tmp_path, tries)) and tries.asked == 0


def test_a_program_that_ends_leaves_no_verdict_of_what_it_was_trying(tmp_path):
    """Its try is ended with it, which is no fault of the kernel."""
    child = "import sys; sys.stdin.readline(); sys.stdin.readline()"
    trials = watchdog.Trials((sys.executable, "-c", child), seconds=60)
    kernels = session(tmp_path)
    kernels.trials = trials
    taken(kernels)
    again = mx.arange(ROWS * 9.0, dtype=mx.float16).reshape(ROWS, 9)
    assert kernels.run(DRAFT_HEAD, again, 3) is None  # and another try waits behind the first
    dog = kernels._watchdog
    while trials._children._child is None:
        dog.wait(0.01)
    dog._end(trials)
    assert not dog.is_trying()
    assert routing.trial_verdicts(tmp_path) == {}


def test_a_process_that_tries_is_started_for_auto_on_metal_alone(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(routing, "Trials", lambda wanted: made.append(wanted) or "tries")
    monkeypatch.setattr(routing, "default_folder", lambda: tmp_path)
    assert routing.begin_trials("auto") == "tries" and made == [True]
    file = watchdog.file_of(tmp_path)
    file.parent.mkdir()
    file.write_text("{}")
    assert routing.begin_trials("auto") == "tries" and made.pop() is False
    assert routing.begin_trials("on") is None and routing.begin_trials("off") is None
    monkeypatch.setattr(routing, "executor", lambda: None)
    assert routing.begin_trials("auto") is None and len(made) == 1


def test_a_model_that_is_switched_on_asks_for_all_that_a_pass_asks_for(tmp_path):
    target = changed_target("qwen3", 4, **SMALL, num_hidden_layers=1)
    target.kernels = Kernels("tiny", target.parameters, tmp_path)
    target.kernels.trials = tries = Tries("hangs")
    target.use_kernels("auto")
    target.kernels.wait()
    tried = {key.partition("/")[0] for key in routing.trial_verdicts(tmp_path)}
    assert tried >= {"verify_qmm", "cascade_attention"} and tries.asked == len(
        routing.trial_verdicts(tmp_path)
    )


# Watched in their first passes


def test_a_new_kernel_is_marked_until_some_passes_went_well(tmp_path):
    kernels = settled(tmp_path)
    (mark,) = marks(tmp_path)
    assert str(os.getpid()) in mark.name and kernels.is_watched
    assert json.loads(mark.read_text()) == [*kernels.choices]
    assert not kernels.end_round(ROWS, 99.0, None)  # the pass with the race counts for nothing
    for _ in range(in_use.PASSES):
        assert mark.exists()
        assert not kernels.end_round(ROWS, 0.1, None)
    assert not mark.exists() and not kernels.is_watched
    assert kernels.end_round(ROWS, 0.1, None) and taken(kernels)
    assert taken(session(tmp_path)) and not marks(tmp_path)  # it is not new to the next start


def test_what_a_dead_process_had_in_use_is_off_for_the_next_start_and_the_doctor_says_so(tmp_path):
    folder = tmp_path / "kernels"
    settled(folder)
    (mark,) = marks(folder)
    assert taken(session(folder))  # that process lives
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mark.rename(mark.with_name(mark.name.replace(str(os.getpid()), str(dead.pid))))
    assert not taken(session(folder))
    assert not marks(folder)
    assert not taken(session(folder))  # nor after it
    (line,) = [line for line in doctor.about(tmp_path) if "turned off" in line]
    assert "in use when its program ended" in line and "draft_head/2" in line


def test_a_kernel_is_marked_before_it_races_and_no_longer_where_it_loses(tmp_path):
    kernels = session(tmp_path, None, 2.0, 1.0)
    taken(kernels)
    kernels.wait()
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_disagreement", lambda *given: seen.append(len(marks(tmp_path))))
        patch.setattr(dispatch, "race", lambda *given: {"": 2.0, "stock": 1.0})
        assert not taken(kernels)
    assert seen == [1] and not marks(tmp_path) and not kernels.is_watched


def test_a_draft_model_whose_passes_nobody_watches_leaves_no_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.Trials, "__call__", lambda self, given: "")
    kernels = session(tmp_path)
    kernels.trials = None
    assert taken(kernels) and not marks(tmp_path)


@pytest.mark.parametrize(("end", "left"), [("sys.exit(1)", 0), ("os._exit(1)", 1)])
def test_a_program_that_ends_by_itself_takes_its_mark_along(tmp_path, end, left):
    script = "import os, sys, pathlib; from dflash_mlx.verifier.in_use import InUse"
    file = str(tmp_path / "model.json")
    script += f"; InUse(pathlib.Path({file!r})).begin('a case'); {end}"
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(marks(tmp_path)) == left == len([*in_use.left_behind(Path(file))])


@pytest.mark.parametrize("text", ["", "[1]", "{}", "null"])
def test_a_damaged_mark_turns_nothing_off(tmp_path, text):
    settled(tmp_path)
    (mark,) = marks(tmp_path)
    mark.rename(mark.with_name(mark.name.replace(str(os.getpid()), "4194304")))
    for file in marks(tmp_path):
        file.write_text(text)
    assert taken(session(tmp_path))


@pytest.mark.parametrize(
    ("usual", "seconds", "expected", "slow"),
    [
        (None, 6.0, 0.2, True),
        (0.2, 6.0, None, True),
        (0.2, 4.9, None, False),  # not long
        (0.5, 6.0, None, False),  # not many times as long
        (None, 6.0, None, False),  # nobody knows
    ],
)
def test_a_pass_that_takes_far_too_long_turns_off_what_is_new(
    tmp_path, usual, seconds, expected, slow
):
    kernels = settled(tmp_path)
    kernels.end_round(ROWS, 0.0, None)
    if usual:
        kernels.end_round(ROWS, usual, None)
    kernels.end_round(ROWS, seconds, expected)
    assert taken(kernels) != slow
    assert taken(session(tmp_path)) != slow
    (choice,) = [*kernel_choices(tmp_path).values()][0].values()
    assert ("took 6.0 s" in choice.reason) == slow


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_the_memory_of_it(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    kernels = settled(folder)
    kernels.fail(RuntimeError("gpu"))
    assert not taken(kernels)


# A pass in which the GPU fails


def answer(pair: Pair, method: str = "ngram") -> list[int]:
    config = DecodeConfig(method=method, max_tokens=12)
    drafter = make_drafter(pair, config)
    scheduler = scheduler_of(pair.target)
    scheduler.add(sequence_of(pair.target, drafter, [3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5], config))
    tokens: list[int] = []
    while len(scheduler):
        for _, said in scheduler.step():
            if isinstance(said, Exception):
                raise said
            tokens += said.tokens
    return tokens


@pytest.fixture(params=["qwen3", "qwen3_5"])
def pair(tmp_path, request) -> Pair:
    changes = {**SMALL, "num_hidden_layers": 1, "vocab_size": 16}
    target = changed_target(request.param, 4, **changes if request.param == "qwen3" else {})
    target.kernels = Kernels("tiny", target.parameters, tmp_path)
    return Pair(target, None, (), None)


@pytest.mark.parametrize("good", [0, 2])  # passes before: it is the prompt's, or a round's
def test_a_pass_in_which_the_gpu_fails_is_done_again_by_stock_and_the_answer_goes_on(
    pair, monkeypatch, good
):
    right = answer(pair)
    passes = []

    def evaluated(*arrays: mx.array) -> None:
        passes.append(pair.target.kernels.active)
        if len(passes) == good + 1:
            raise RuntimeError("[METAL] Command buffer execution failed\nerror: GPU hang")
        mx.eval(*arrays)

    pair.target.kernels.trials = Tries("never")
    pair.target.use_kernels("auto")
    monkeypatch.setattr(Kernels, "is_watched", property(lambda self: self.active))
    monkeypatch.setattr(step, "mx", SimpleNamespace(eval=evaluated, array=mx.array))
    assert answer(pair) == right
    assert passes == [True] * (good + 1)
    assert pair.target.kernels.mode == "off" and not pair.target.kernels.active


def test_a_launch_that_fails_is_done_again_by_stock_and_off_for_the_next_start(
    pair, tmp_path, monkeypatch
):
    right = answer(pair)
    pair.target.kernels.trials = Tries()
    pair.target.use_kernels("auto")
    pair.target.kernels.wait()
    won = dispatch.Choice(True, "faster", "once")
    monkeypatch.setattr(dispatch.Dispatch, "_decide", lambda self, *given: won)

    def fails(*given: object, **more: object) -> None:
        raise RuntimeError("GPU gone")

    monkeypatch.setattr("kernels_metal.factory.Prepared.__call__", fails)
    assert answer(pair) == right
    assert pair.target.kernels.mode == "off"
    (choices,) = kernel_choices(tmp_path).values()
    assert choices and not any(choice.kernel for choice in choices.values())
    assert any("GPU gone" in choice.reason for choice in choices.values())


@pytest.mark.parametrize("late", [False, True])  # where they are not waited for as they are made
def test_drafts_in_which_the_gpu_fails_are_made_again_by_stock(pair, monkeypatch, late):
    right = answer(pair)
    failed: list[str] = []

    def failing(forward: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            if pair.target.kernels.active:
                failed.append(forward.__name__)
                raise RuntimeError("GPU hang")
            return forward(*given)

        return call

    pair.target.kernels.trials = Tries("never")
    pair.target.use_kernels("auto")
    monkeypatch.setattr(Kernels, "is_watched", property(lambda self: self.active))
    owner, name = (Tree, "wait") if late else (BatchBudget, "propose")
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    assert answer(pair) == right
    assert failed == [name] and pair.target.kernels.mode == "off"


def test_a_wait_for_drafts_that_fails_is_told_with_what_its_sequence_commits(pair, monkeypatch):
    """Outside of that it would end the answers of all sequences of a pass."""
    right, waited = answer(pair), []

    def wait(self: Tree) -> None:
        waited.append(self)
        raise RuntimeError("GPU hang")

    monkeypatch.setattr(Tree, "is_known", False)
    monkeypatch.setattr(Tree, "wait", wait)
    assert answer(pair) == right and waited


def test_what_fails_by_stock_too_fails_as_before(pair, monkeypatch):
    def fails(*given: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(pair.target, "forward_all", fails)
    pair.target.kernels.trials = Tries()
    for mode in ("off", "auto"):  # and is no fault of theirs
        pair.target.use_kernels(mode)
        with pytest.raises(RuntimeError, match="no"):
            answer(pair)
        assert pair.target.kernels.mode == mode


def test_a_pass_behind_one_that_nobody_waited_for_is_not_done_again(pair, monkeypatch):
    """The GPU's error may be that one's, whose token and keys are then no numbers to go on with."""
    started = []

    def starts(*arrays: mx.array) -> None:
        started.append(arrays)
        if len(started) == 3:
            raise RuntimeError("GPU hang")

    pair.target.kernels.trials = Tries("never")
    pair.target.use_kernels("auto")
    pair.target.kernels.wait()
    monkeypatch.setattr(Kernels, "is_watched", False)
    monkeypatch.setattr(verify.mx, "async_eval", starts)
    with pytest.raises(RuntimeError, match="GPU hang"):
        answer(pair, "none")


def test_all_sequences_of_a_pass_in_which_the_gpu_fails_have_it_done_again(pair, monkeypatch):
    """The error is told once, and what the others would read then is garbage."""
    config = DecodeConfig(method="ngram", max_tokens=4)
    again = []

    def fails(*arrays: mx.array) -> None:
        monkeypatch.setattr(step, "mx", mx)
        raise RuntimeError("GPU hang")

    def passes(target: object, parts: list, observer: object) -> list:
        again.append((pair.target.kernels.active, len(parts)))
        return forward(target, parts, observer)

    forward = step.forward
    pair.target.kernels.trials = Tries("never")
    pair.target.use_kernels("auto")
    monkeypatch.setattr(step, "forward", passes)
    monkeypatch.setattr(Kernels, "is_watched", property(lambda self: self.active))
    monkeypatch.setattr(step, "mx", SimpleNamespace(eval=fails, array=mx.array))
    scheduler = scheduler_of(pair.target)
    for prompt in ([3, 1, 4], [1, 5, 9]):
        drafter = make_drafter(pair, config)
        scheduler.add(sequence_of(pair.target, drafter, prompt, config))
    said = finish(scheduler)
    assert not any(isinstance(delta, Exception) for own in said.values() for delta in own)
    assert again[:3] == [(True, 2), (False, 1), (False, 1)]


# Times that no longer hold


def test_times_that_drift_in_a_folder_that_nobody_may_write_break_no_answer(
    pair, tmp_path, monkeypatch
):
    (tmp_path / "times.json").mkdir()  # which is refused to be removed, like any file to others
    monkeypatch.setattr(pass_times, "_file", lambda target: tmp_path / "times.json")
    monkeypatch.setattr(pair.target, "pass_times", PassTimes((1, 96), (0.1, 0.1)))
    for _ in range(pass_times._NOTICED):
        noticed(pair.target, 8, [100], 5.0)
    assert not pair.target.drift


@pytest.mark.parametrize(("seconds", "kept"), [(0.1, True), (0.12, True), (0.14, False)])
def test_times_that_drift_are_measured_again_by_the_next_start(pair, tmp_path, seconds, kept):
    target = pair.target
    file = tmp_path / "times.json"
    file.write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_times, "_file", lambda target: file)
        noticed(target, 8, [100], 9.0)  # nothing was measured yet
        target.pass_times = PassTimes((1, 96), (0.1, 0.1))
        for i in range(pass_times._NOTICED):
            assert file.exists()
            noticed(target, 8, [100], 5.0 if i % 8 == 0 else seconds)
    assert file.exists() == kept
