"""Commands on several ranks: the same answers, refusals by name, and one end for all."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from dflash_mlx.cli.ranks import joined
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import ranks
from dflash_mlx.models.available import check_memory, needed_by
from dflash_mlx.models.names import find_names
from dflash_mlx.train.crew import Crew
from support.models import edit_config, write_endless_model, write_model
from support.ranks import LIMIT, ended, on_ranks, started
from support.ranks_answers import everything, pair_of
from support.ranks_families import CASES

GENERATE = ["-m", "dflash_mlx.generate", "--method", "none", "--prompt", "hello"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words that work for long."""
    folder = write_endless_model(tmp_path_factory.mktemp("endless") / "model")
    return [*GENERATE, "--model", str(folder), "--max-tokens", "90000"]


def test_two_ranks_say_what_one_says(tmp_path, model):
    out = tmp_path / "found.json"
    words = ["-m", "support.ranks_answers", str(model), str(tmp_path / "drafters"), str(out)]
    said = on_ranks(tmp_path, 2, *words)
    assert [(each.code, each.out, each.sentences) for each in said] == [(0, "", [])] * 2
    found = json.loads(out.read_text())
    expected = json.loads(json.dumps(everything(pair_of(model, tmp_path / "alone"))))
    assert found == expected
    assert found["reused"] > 0 and len(found["several"]) == 5


def test_only_the_first_rank_prints_an_answer(tmp_path, model):
    words = [*GENERATE, "--model", str(model), "--max-tokens", "8", "--json"]
    first, second = on_ranks(tmp_path, 2, *words)
    (alone,) = on_ranks(tmp_path, 1, *words)
    assert (first.code, second.code, second.out, second.error) == (0, 0, "", "")
    assert json.loads(first.out)["tokens"] == json.loads(alone.out)["tokens"]


def test_parts_of_many_families_say_what_whole_models_say(tmp_path):
    out = tmp_path / "far.json"
    said = on_ranks(tmp_path, 2, "-m", "support.ranks_families", str(out))
    assert [(each.code, each.out) for each in said] == [(0, "")] * 2, said
    far = json.loads(out.read_text())
    assert [*far] == [*CASES] and max(far.values()) < 1e-4, far


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "dflash_mlx.convert", "a", "b"], "dflash_mlx.convert takes one process"),
        ([*GENERATE[:-1], "-"], "standard input takes one process"),
    ],
)
def test_what_takes_one_process_is_refused_by_name(tmp_path, words, said):
    first, second = on_ranks(tmp_path, 2, *words)
    assert first.code == 2 and said in first.error and len(first.sentences) == 1
    assert (second.code, second.out, second.error) == (0, "", "")


class OtherRank:
    """The first rank's side of a meeting with one that was started with other words."""

    rank, size, followers = 0, 2, (1,)

    def __init__(self, own: list[str], its: list[str]) -> None:
        self.words, self._its = own, its

    def hear(self, *_: object) -> dict[str, object]:
        return ranks._start(SimpleNamespace(words=self._its))

    def tell(self, message: object) -> None:
        assert message == {}

    def fault(self, reason: str, code: int) -> NoReturn:
        raise DFlashError(reason, str(code))


def test_words_that_can_be_no_files_are_compared_as_words():
    ranks.check_same(OtherRank(["--system", "x" * 300], ["--system", "x" * 300]))
    with pytest.raises(DFlashError, match="rank 1 of 2 differs: words"):
        ranks.check_same(OtherRank(["--system", "x" * 300], ["--system", "y" * 300]))


@pytest.mark.parametrize("how", [["--key", "secret"], ["--key=secret"]])
def test_a_key_is_not_told_where_words_differ(how):
    with pytest.raises(DFlashError, match="--port") as refused:
        ranks.check_same(OtherRank([*how, "--port", "1"], [*how, "--port", "2"]))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("silence", ["soon", "0", "inf"])
def test_a_silence_that_is_none_is_refused(monkeypatch, capsys, silence):
    monkeypatch.setenv("DFLASH_SILENCE", silence)
    monkeypatch.setenv("MLX_RANK", "0")
    joined.cache_clear()
    with pytest.raises(SystemExit) as left:
        joined()
    assert left.value.code == 2
    assert f"DFLASH_SILENCE is '{silence}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (3, {}, ["num_attention_heads 4", "num_key_value_heads 2", "start 2 ranks"]),
        (2, {"model_type": "gemma"}, ["gemma", "does not split"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(tmp_path, ranks, changes, said):
    folder = write_model(tmp_path / "model")
    edit_config(folder, **changes)
    first, *others = on_ranks(tmp_path, ranks, *GENERATE, "--model", str(folder))
    assert first.code == 2 and len(first.sentences) == 1
    assert all(part in first.error for part in said)
    assert [(each.code, each.out, each.error) for each in others] == [(0, "", "")] * (ranks - 1)


def test_ranks_that_differ_are_refused_by_name(tmp_path, model):
    words = [*GENERATE, "--model", str(model)]
    with started(tmp_path, [words, [*words, "--kv-bits", "8"]]) as running:
        said = ended(running)
    for each in said:
        (sentence,) = each.sentences
        assert each.code == 2 and "rank 1" in sentence and "--kv-bits" in sentence


def test_a_rank_without_the_model_ends_all(tmp_path, model):
    other = tmp_path / "elsewhere"
    other.mkdir()
    words = [*GENERATE, "--model", "model"]
    with started(tmp_path, [words, words], places=[model.parent, other]) as running:
        said = ended(running)
    for each in said:
        (sentence,) = each.sentences
        assert each.code == 2 and "rank 1" in sentence and "model is no" in sentence


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_gone_ends_all_with_one_sentence(tmp_path, endless, victim, how):
    with started(tmp_path, [endless] * 2, (LIMIT, 60.0)) as running:  # the first rank's counts
        assert running[0].stdout.read(1), "it answers"
        running[victim].send_signal(how)
        begin = time.monotonic()
        (said,) = ended([running[1 - victim]], LIMIT + 10)
        assert time.monotonic() - begin < LIMIT + 5
        (sentence,) = said.sentences
        assert said.code == 1 and f"rank {victim} " in sentence
        if how == signal.SIGSTOP:  # who wakes up afterwards is told
            running[victim].send_signal(signal.SIGCONT)
            (late,) = ended([running[victim]], 10)
            assert late.code == 1 and len(late.sentences) == 1


def test_ctrl_c_ends_all(tmp_path, endless):
    with started(tmp_path, [endless] * 2) as running:
        assert running[0].stdout.read(1), "it answers"
        for each in running:
            each.send_signal(signal.SIGINT)
        said = ended(running, 20)
    assert [each.code for each in said] == [130, 0]
    assert said[1].error == ""


def test_help_ends_all_without_a_word_of_the_others(tmp_path):
    first, second = on_ranks(tmp_path, 2, "-m", "dflash_mlx.generate", "--help")
    assert (first.code, second.code) == (0, 0) and "--prompt" in first.out
    assert first.error == second.error == second.out == ""


@pytest.mark.parametrize("launched", [False, True])
def test_a_program_that_is_alone_asks_mlx_for_no_others(monkeypatch, tmp_path, launched):
    if launched:  # as mlx.launch starts one process
        (tmp_path / "hosts").write_text("")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
        monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setattr("mlx.core.distributed.init", lambda *_, **__: pytest.fail("it looks"))
    joined.cache_clear()
    assert joined() is None and Crew.here() == Crew()


def test_a_server_needs_only_its_part_of_the_memory(monkeypatch):
    names = find_names(PairConfig())
    whole, part = needed_by(names), needed_by(names, 3)
    monkeypatch.setattr("dflash_mlx.models.available.available_memory", lambda: (whole + part) // 2)
    check_memory(PairConfig(), machines=3)
    with pytest.raises(DFlashError, match="needs about"):
        check_memory(PairConfig())
