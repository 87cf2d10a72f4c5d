"""Commands on several ranks: the same answers, refusals by name, and one end for all."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from dflash_mlx.cli.ranks import joined
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.available import check_memory, needed_by
from dflash_mlx.models.names import find_names
from dflash_mlx.train.crew import Crew
from support.models import edit_config, write_endless_model, write_model
from support.ranks import LIMIT, ended, on_ranks, started
from support.ranks_answers import everything, pair_of

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
    said = on_ranks(tmp_path, 2, *words, silence=20)
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
    with started(tmp_path, [endless] * 2) as running:
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
    first, second = on_ranks(tmp_path, 2, "-m", "dflash_mlx.generate", "--help", silence=20)
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
