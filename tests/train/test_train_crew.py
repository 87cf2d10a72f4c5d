"""Several processes train as one does with all their sequences."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_mlx import corpus as collect
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.__main__ import main as train
from dflash_mlx.train.rows import read_rows
from dflash_mlx.train.run import STATE
from support.ranks import ended, kill, launched, on_ranks
from support.tiny_training import corpus_rows, files


@pytest.mark.parametrize("mode", ["variable-prefix", "specdiff"])
def test_two_processes_are_one_with_twice_the_batch(place, mode, tmp_path):
    settings = {"steps": 6, "mode": mode, "warmup": 2, "block_size": 4, "layers": 1}
    settings["learning_rate"] = 1e-4  # Adam makes much of rounding where a gradient is nearly zero
    words = place.words(**settings, out=tmp_path / "two", sequences=2)
    said = on_ranks(tmp_path, 2, "-m", "dflash_mlx.train", *words)
    assert [each.code for each in said] == [0, 0], said
    assert (said[1].out, said[1].error) == ("", "")
    place.train(**settings, out=tmp_path / "one", sequences=4)
    one, two = (load_file(tmp_path / name / STATE) for name in ("one", "two"))
    assert one.keys() == two.keys() and any("network" in name for name in one)
    for name, array in one.items():
        np.testing.assert_allclose(array, two[name], atol=1e-5, err_msg=name)
        far = np.linalg.norm(array - two[name]) / (np.linalg.norm(array) or 1)
        assert far < 1e-4, f"{name}: {far} of its size"  # whatever the rate: moments, too
    first, second = (last_record(tmp_path / name) for name in ("one", "two"))
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-4)
    assert first["step"] == second["step"] == 6


def last_record(folder):
    return json.loads((folder / "history.jsonl").read_text().splitlines()[-1])


class Asked:
    """The second of two ranks, which only tells what it would train with."""

    rank, size, group = 1, 2, None

    def check_alike(self, own):
        raise Told(own)


class Told(Exception):
    pass


def test_ranks_tell_each_other_what_they_would_train_with_before_they_do(place, tmp_path):
    def told(command, *words):
        with pytest.raises(Told) as said:
            command(words, Asked())
        return said.value.args[0]

    words = place.words(steps=9, out=tmp_path / "out")
    first, second = told(train, *words), told(train, *words, "--seed", "9")
    assert {key for key in first if first[key] != second[key]} == {"seed"}
    fewer = place.words(corpus=place.write("c.jsonl", corpus_rows()[:5]), steps=9)
    assert told(train, *fewer)["data"] != first["data"]
    words, prompts = ["--model", str(place.model), "--out", str(tmp_path / "answers")], []
    for i in range(2):
        file = tmp_path / f"{i}.jsonl"
        file.write_text(json.dumps({"category": "c", "prompt": "hi" * (1 + i)}) + "\n")
        prompts.append(told(collect.main, *words, "--prompts", str(file)))
    assert {key for key in prompts[0] if prompts[0][key] != prompts[1][key]} == {"prompts"}
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("answers*"))


def test_a_killed_rank_ends_a_training_that_goes_on_with_as_many(place, tmp_path):
    out = tmp_path / "out"

    def words(steps):
        return ["-m", "dflash_mlx.train", *place.words(steps=steps, out=out, evaluate_minutes=1e-9)]

    with launched(tmp_path, 2, words(10_000)) as launcher:
        while "step 2 |" not in (line := launcher.stderr.readline()):
            assert line, "it has ended"
        kill(tmp_path, 1)
        (said,) = ended([launcher], 30)
    assert "rank 1 exited with code -9" in said.error
    done = last_record(out)["step"]
    assert [each.code for each in on_ranks(tmp_path, 2, *words(done + 2))] == [0, 0]
    assert last_record(out)["step"] == done + 2
    before = files(out)
    with pytest.raises(DFlashError, match="processes 2, not 1"):
        place.train(steps=done + 4, out=out)
    assert files(out) == before


def test_a_corpus_of_two_ranks_has_every_prompt_once(tmp_path, place):
    rows = [{"id": f"q{i}", "category": "c", "prompt": f"hi {i}"} for i in range(7)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    words = ["--model", str(place.model), "--prompts", str(prompts), "--method", "none"]
    words += ["--max-tokens", "6", "--greedy-share", "1", "--out"]
    two, one = tmp_path / "two.jsonl", tmp_path / "one.jsonl"
    collect.main([*words, str(two), "--limit", "3"])
    assert len(read_rows(two)) == 3
    said = on_ranks(tmp_path, 2, "-m", "dflash_mlx.corpus", *words, str(two))
    assert [each.code for each in said] == [0, 0], said
    assert "7 rows" in said[0].out and (said[1].out, said[1].error) == ("", "")
    collect.main([*words, str(one)])
    by_id = [{row.id: row for row in read_rows(file)} for file in (two, one)]
    assert by_id[0] == by_id[1] and len(read_rows(two)) == 7
    assert not list(tmp_path.glob("two.rank*")), "its rows are in the first one's file"
