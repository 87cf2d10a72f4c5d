"""The papers' tables: sets as published, and what is trained, walked, told and gone on with."""

from __future__ import annotations

import json
from functools import partial

import paper
import paper_sets
import paper_study
import paper_variants
import pytest
import simulate_trees
from paper_tables import PAPERS, Row, Table, add_cut

from dflash_mlx.benchmark.selection import read_methods
from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.paper import KNOBS, add_controls
from dflash_mlx.train.__main__ import parser as training
from dflash_mlx.train.blocks import SAMPLERS, BlockSampler
from dflash_mlx.train.rows import CorpusRow
from dflash_mlx.verifier.model import Target
from support.families import make_model
from support.pairs import full_pair

PUBLISHED = {  # a row of each set in the shape in which it is published
    "gsm8k": {"question": "How many apples?", "answer": "3 #### 3"},
    "MATH-500": {"problem": "Find x.", "solution": "x", "unique_id": "test/1.json"},
    "aime25": {"problem": "Find the sum.", "answer": "70", "id": "0"},
    "HumanEval": {"task_id": "HumanEval/0", "prompt": "def f(x):", "entry_point": "f"},
    "mbpp": {"task_id": 2, "prompt": "Write a function.", "code": "def g(): pass"},
    "livecodebench": {
        "question_content": "Sort.",
        "starter_code": "class S:",
        "difficulty": "easy",
    },
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorten it."]},
    "alpaca": {"instruction": "Name three.", "input": "colours", "output": "red"},
}


@pytest.fixture
def sets(tmp_path):
    folder = tmp_path / "sets"
    folder.mkdir()
    for name, row in PUBLISHED.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_the_eight_sets_are_read_as_they_are_published(sets):
    rows = paper_sets.read_sets(sets, None)
    assert {row["category"] for row in rows} == set(PUBLISHED)
    assert len({row["id"] for row in rows}) == len(rows) == 8
    texts = [row["messages"][0]["content"] for row in rows]
    assert "Find the sum." in texts and "Name three.\n\ncolours" in texts
    assert paper_sets.missing(sets) == []


@pytest.mark.parametrize("as_list", [False, True])
def test_a_second_turn_is_asked_behind_the_models_own_answer_to_the_first(sets, as_list):
    row = PUBLISHED["mt-bench"]
    (sets / "mt-bench.jsonl").write_text(json.dumps([row] if as_list else row))
    asked: list[list[str]] = []

    def answer(rows, turn):
        asked.append([row["id"] for row in rows])
        return {row["id"]: f"answer {turn}" for row in rows}

    rows = paper_sets.all_turns(paper_sets.read_sets(sets, None), answer)
    assert asked == [["mt-bench-1"]], "nothing else is answered beforehand"
    *_, last = rows
    assert (len(rows), last["id"], last["category"]) == (9, "mt-bench-1 turn 2", "mt-bench")
    said = [(message["role"], message["content"]) for message in last["messages"]]
    assert said == [("user", "Write."), ("assistant", "answer 1"), ("user", "Shorten it.")]
    assert all("then" not in row for row in rows)


def test_a_set_that_is_missing_says_where_it_is_published(sets):
    (sets / "aime25.jsonl").unlink()
    (sentence,) = paper_sets.missing(sets)
    assert "aime25.jsonl" in sentence and "math-ai/aime25" in sentence
    assert paper_sets.missing(sets / "gsm8k.jsonl") == []


def test_every_row_names_a_method_and_variants_that_there_are():
    add_controls()
    add_cut()
    for table in (table for tables in PAPERS.values() for table in tables):
        for row in table.rows:
            read_methods(row.method, DecodeConfig(), KNOBS)
            assert {row.drafter, row.second} <= {"", "none", *paper_variants.VARIANTS}
    for variant in paper_variants.VARIANTS.values():
        words = variant.words.format(init="one").split()
        training().parse_args([*words, "--out", "o", "--corpus", "c", "--steps", "1"])


def test_what_a_row_trained_is_its_second_draft_model_where_that_was_trained():
    rows = {row.label: row for table in PAPERS["d2sd"] for row in table.rows}
    names = {label: rows[label].variant for label in ("blocks of masks, as the first", "24", "1")}
    assert names == {"blocks of masks, as the first": "second-none", "24": "second-24", "1": ""}
    (alone,) = (row for row in rows.values() if row.second == "none")
    assert (alone.variant, alone.is_trained) == ("", False)


def test_a_cut_leaves_out_the_branches_below_it(tmp_path):
    """Above every posterior it leaves the first draft alone."""
    add_controls()
    add_cut()
    pair = full_pair(tmp_path, Target(make_model("llama"), 200, "tiny"))
    names = ("dflash1", "d2sd:growth=paper", "d2sd:growth=paper:cut=0", "d2sd:growth=paper:cut=100")
    methods = read_methods(",".join(names), DecodeConfig(), KNOBS)
    drafters = {name: make_drafter(pair, methods[name]) for name in names}
    row = CorpusRow("a", "math", (5, 9, 5, 3), tuple(range(4, 24)), 0.0)
    with simulate_trees.remembering() as memory:
        counts = simulate_trees.simulate(pair, drafters, [row], memory)
    alone, whole, none, most = (counts[name].answers["all"] for name in names)
    assert whole == none != most == alone


def test_a_method_that_is_refused_does_not_part_those_that_walk_together(tmp_path, monkeypatch):
    add_controls()
    pair = full_pair(tmp_path, Target(make_model("llama"), 200, "tiny"))
    row = CorpusRow("a", "math", (5, 9, 5, 3), tuple(range(4, 24)), 0.0)
    walks, simulate = [], simulate_trees.simulate
    breaks = ""

    def watched(pair, drafters, *more):
        walks.append([*drafters])
        if breaks in drafters:
            raise DFlashError("it broke", "mend it")
        return simulate(pair, drafters, *more)

    monkeypatch.setattr(paper_study, "make_ready", lambda *asked: None)
    monkeypatch.setattr(paper_study, "load_pair", lambda *asked: pair)
    monkeypatch.setattr(simulate_trees, "read_answers", lambda *asked: [row])
    monkeypatch.setattr(simulate_trees, "simulate", watched)
    found = paper_study.walked(PairConfig(), ["ngram:4", "mtp:8", "dflash1:4"], tmp_path)
    assert walks == [["ngram:4", "dflash1:4"]]
    assert [name for name, figures in found.items() if "refused" in figures] == ["mtp:8"]
    breaks = "ngram:4"
    again = paper_study.walked(PairConfig(), ["ngram:4", "mtp:8", "dflash1:4"], tmp_path)
    assert walks[1:] == [["ngram:4", "dflash1:4"], ["ngram:4"], ["dflash1:4"]]
    assert again["ngram:4"] == {"refused": "it broke"} and again["dflash1:4"] == found["dflash1:4"]


def test_words_behind_two_dashes_go_to_the_trainings():
    own, options = paper.split(["dflash", "--out", "o", "--", "--anchors", "8"])
    assert (own, options) == (["dflash", "--out", "o"], ["--anchors", "8"])
    assert paper.split(["dflash"]) == (["dflash"], [])


def test_random_masks_are_a_law_of_the_blocks_that_no_option_tells(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(paper_variants, "train", lambda words: seen.append((words, {**SAMPLERS})))
    (tmp_path / "second-random").mkdir()
    paper_variants.trained("second-random", tmp_path, ["--steps", "1"], "first")
    ((words, samplers),) = seen
    law = samplers["even"]
    assert (
        isinstance(law, partial) and law.func is BlockSampler and SAMPLERS["even"] is BlockSampler
    )
    assert law.keywords == {"reveal_share": 1.0}
    assert words[words.index("--init") + 1] == "first"


def small_table(name: str = "taps-1") -> Table:
    rows = (
        Row("look-up", "ngram:4", "1.5"),
        Row("one tap", "dflash1:4", drafter=name),
        Row("used as 6", "dflash1:6", drafter="wider"),
        Row("a head", "mtp:8"),
    )
    return Table("Small", "nowhere", rows)


@pytest.fixture
def words(place, monkeypatch):
    """A command line on the tiny target, whose table has a row of each kind."""
    monkeypatch.setitem(PAPERS, "dflash", (small_table(),))
    variant = paper_variants.Variant("--mode dflash --taps 1 --layers 1 --block-size 4")
    wider = paper_variants.Variant(variant.words, read_in=6)
    monkeypatch.setattr(paper_variants, "VARIANTS", {"taps-1": variant, "wider": wider})
    prompts = place.root / "prompts.jsonl"
    prompts.write_text(json.dumps(PUBLISHED["mt-bench"]) + "\n")
    given = ["--out", str(place.root / "study"), "--prompts", str(prompts), "--max-tokens", "8"]
    given += ["--model", str(place.model), "--corpus", str(place.corpus), "--rows", "6"]
    return ["dflash", *given, "--steps", "2"]


OF_TRAININGS = ["--", "--sequences", "2", "--anchors", "4", "--held-out", "3"]


def test_a_study_goes_on_where_it_was_and_says_what_a_pair_does_not_serve(
    words, place, monkeypatch, capsys
):
    paper.main([*words, *OF_TRAININGS])
    first = (place.root / "study" / "dflash.md").read_text()
    lines = first.splitlines()
    (look_up, tap, wider, head) = (
        line for line in lines if line.startswith("| ") and "T =" not in line and "---" not in line
    )
    assert look_up.endswith("| - | 1.5 |") and "2 steps" in tap and head.count("| - ") == 6
    assert any(line.startswith("* a head: ") for line in lines)
    asked = [json.loads(line) for line in (place.root / "study" / "prompts.jsonl").open()]
    assert [len(row["messages"]) for row in asked] == [1, 3]

    monkeypatch.setattr(paper_variants, "train", lambda words: pytest.fail("trained again"))
    monkeypatch.setattr(paper_study.simulate_trees, "simulate", lambda *a: pytest.fail("walked"))
    table = Table("Small", "nowhere", small_table().rows[:3])
    monkeypatch.setitem(PAPERS, "dflash", (table,))
    paper.main([*words, *OF_TRAININGS])
    assert (place.root / "study" / "dflash.md").read_text().splitlines()[:9] == lines[:9]


def test_a_folder_of_other_prompts_is_not_gone_on_with(words, place):
    study = place.root / "study"
    study.mkdir()
    (study / "study.json").write_text(json.dumps({"max_tokens": 8, "prompts": []}))
    with pytest.raises(DFlashError, match="prompts"):
        paper.main(words)


@pytest.mark.parametrize("option", ["--limit", "--rows", "--max-tokens", "--minutes"])
def test_numbers_that_make_no_sense_are_refused_before_anything_is_made(words, place, option):
    if option == "--minutes":
        words = words[: words.index("--steps")]
    with pytest.raises(DFlashError, match="-1"):
        paper.main([*words, option, "-1"])
    assert not (place.root / "study").exists()
