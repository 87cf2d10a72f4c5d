"""A pass or draft in which the GPU fails is done again by stock; times that no longer hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import mlx.core as mx
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine import step, verify
from dflash_mlx.engine.pair import Pair
from dflash_mlx.verifier import pass_times
from dflash_mlx.verifier.pass_times import PassTimes, noticed
from dflash_mlx.verifier.routing import Kernels, kernel_choices
from kernels_metal import dispatch
from kernels_metal.emulator import Run
from support.decoding import finish, scheduler_of, sequence_of
from support.hybrids import changed_target
from support.tries import Tries, emulated_metal

SMALL = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def metal() -> Iterator[Run]:
    with emulated_metal() as run:
        yield run


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
