"""A target with drafters of two families on the disk: `auto` takes what was faster here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_chat.backend import Backend
from dflash_chat.speeds import Timing
from dflash_mlx import DFlashError, PairConfig, doctor, generate
from dflash_mlx.benchmark import quick
from dflash_mlx.benchmark.quick import comparing
from dflash_mlx.core.config import PLAIN, DecodeConfig, SamplingConfig
from dflash_mlx.core.option import Given
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.pair import MARGIN, Pair, Speeds, read_speeds
from dflash_mlx.models import choice, names
from dflash_mlx.models import load as loading
from dflash_mlx.models.check import check_drafter, describe_target
from dflash_mlx.models.load import check_named, lines, load_pair
from dflash_mlx.models.names import Entry, find_source
from dflash_mlx.models.source import DRAFTER
from dflash_mlx.serve import running
from dflash_mlx.verifier.model import Target
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.mtp_targets import write_target

pytestmark = pytest.mark.usefixtures("no_network", "no_hub", "interpreted")
SPEEDS_FILE = choice.speeds_file  # which every test has a substitute for
FAMILIES = ("dflash", "mtp")
PLAIN_SPEED = 10.0  # tokens per second


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target with a head in its own folder, and a DFlash drafter that is known for it."""
    root = tmp_path_factory.mktemp("both")
    target = Target(make_model("qwen3_5"), 512, "tiny")
    drafter_folder(root / "drafter", [0, 1], 1, target)
    drafter_folder(root / "second", [0], 2, target)
    found = {name: str(root / name) for name in ("drafter", "second")}
    return {"model": str(write_target(root / "tiny")), **found}


@pytest.fixture(autouse=True)
def file(both: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where speeds are kept."""
    place = tmp_path / "timing" / "drafters-tiny.json"
    known = Entry(("owner/tiny",), both["drafter"], both["second"])
    monkeypatch.setattr(names, "entries", lambda: (known,))
    monkeypatch.setattr(choice, "speeds_file", lambda *_: place)
    prompts = "".join(f'{{"prompt": "{word}, {word}"}}\n' for word in ("hello", "river", "tea"))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    monkeypatch.setattr(quick, "PROMPTS", tmp_path / "prompts.jsonl")
    monkeypatch.setattr(quick, "TOKENS", 4)
    return place


def pair_of(both: dict[str, str], *uses: DecodeConfig, **settings: Any) -> Pair:
    return load_pair(PairConfig(both["model"], **settings), *uses)


def families(pair: Pair) -> list[str]:
    return [drafter.family for drafter in pair.drafters]


def write(file: Path, both: dict[str, str], dflash: float, mtp: float) -> None:
    rows = [("dflash", both["drafter"], dflash), ("mtp", both["model"], mtp)]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"model": both["model"], "speeds": rows}))


def plant(monkeypatch: pytest.MonkeyPatch, dflash: float, mtp: float) -> None:
    """Answers take what this says, whatever the clock does."""
    times = {PLAIN: 1.0, "mtp": mtp}
    speed = property(lambda its: PLAIN_SPEED * times.get(its.method, dflash))
    monkeypatch.setattr(Statistics, "tokens_per_second", speed)


@pytest.mark.parametrize(("dflash", "mtp"), [(1.7, 2.1), (2.1, 1.7)])
def test_the_faster_of_two_is_measured_and_taken_from_the_next_start_on(
    both, file, monkeypatch, dflash, mtp
):
    plant(monkeypatch, dflash, mtp)
    first = pair_of(both)
    assert families(first) == ["dflash", "dflash"] and not first.notes
    *steps, said = comparing(first)
    assert len(steps) > 60, "others have the machine between passes"
    assert [(family, times) for family, _, times in read_speeds(file)] == [
        ("dflash", dflash),
        ("mtp", mtp),
    ]
    later = pair_of(both)
    assert families(later) == (["mtp"] if mtp > dflash else ["dflash", "dflash"])
    faster = both["model" if mtp > dflash else "drafter"]
    assert later.drafter_name == faster
    assert "from the next start on " + later.notes[0] == said and len(later.notes) == 1
    assert later.notes[0].startswith(faster) and "2.10" in said and "1.70" in said
    assert [*comparing(later)] == [], "once"
    assert first.learned == {}, "the other is let go, with what was learned of both"


def test_what_is_measured_again_may_take_the_place_back(both, file, monkeypatch):
    write(file, both, 1.7, 2.1)
    pair = pair_of(both)
    plant(monkeypatch, 1.9, 1.2)
    assert both["drafter"] in [*comparing(pair, again=True)][-1].split(" drafts")[0]
    assert [family for family, *_ in read_speeds(file)] == [*FAMILIES], "in the order as before"
    assert families(pair_of(both)) == ["dflash", "dflash"]


def test_what_nobody_can_tell_apart_stays_in_the_registry_s_order(both, file):
    write(file, both, 2.0, 2.0 * (MARGIN - 0.01))
    assert families(pair_of(both)) == ["dflash", "dflash"]
    write(file, both, 2.0, 2.0 * (MARGIN + 0.01))
    assert families(pair_of(both)) == ["mtp"]


def test_answers_are_plain_decoding_s_whichever_drafts(both, file):
    uses = [DecodeConfig(max_tokens=24), DecodeConfig("mtp", max_tokens=24)]
    uses.append(DecodeConfig(max_tokens=24, sampling=SamplingConfig(temperature=0.8, seed=3)))
    found = []
    for speeds in ((2.0, 1.0), (1.0, 2.0)):
        write(file, both, *speeds)
        pair = pair_of(both)
        plain = generate(pair, "hello, hello", DecodeConfig(PLAIN, max_tokens=24)).tokens
        greedy, named, warm = (generate(pair, "hello, hello", use) for use in uses)
        assert greedy.tokens == named.tokens == plain and len(plain) == 24
        assert greedy.statistics.method in ("mtp", "dflash", "ddtree", "d2sd")
        found.append((greedy.tokens, warm.tokens, pair.template))
        other = "dflash" if families(pair) == ["mtp"] else "mtp"
        assert generate(pair, "hello, hello", DecodeConfig(other, max_tokens=24)).tokens == plain
    assert found[0] == found[1]


def test_whoever_names_a_drafter_or_a_method_or_sets_sizes_gets_that(both, file):
    write(file, both, 1.0, 2.0)
    assert families(pair_of(both)) == families(pair_of(both, DecodeConfig())) == ["mtp"]
    assert families(pair_of(both, DecodeConfig(PLAIN), DecodeConfig())) == ["mtp"]
    assert families(pair_of(both, drafter=both["drafter"]))[0] == "dflash"
    assert families(pair_of(both, drafter=PLAIN)) == []
    assert families(pair_of(both, second_drafter=both["second"])) == ["dflash", "dflash"]
    for use in (
        DecodeConfig("d2sd"),
        DecodeConfig(options=Given((("branches", 2),))),
        DecodeConfig(block_size=4),
    ):
        pair = pair_of(both, use)
        assert families(pair)[0] == "dflash", use
        assert pair.speeds is None and not pair.notes
    assert len(pair_of(both).of("dflash")) == 2, "the second one is known, too"


DAMAGED = ["", '{"speeds": 1}', '{"speeds": [["mtp", "x", "fast"]]}', "[]", "\x00", "[" * 99999]


def test_a_damaged_file_is_told_by_the_doctor_and_measured_anew(both, file, monkeypatch):
    file.parent.mkdir()
    for text in DAMAGED:
        file.write_text(text)
        assert Speeds(file, "T", (("", "A"),)).stored().found == (), text[:20]
        assert "unreadable" in "\n".join(doctor.about(file.parents[1])), text[:20]
    plant(monkeypatch, 1.7, 2.1)
    pair = pair_of(both)
    assert families(pair) == ["dflash", "dflash"]
    [*_, said] = comparing(pair)
    assert "from the next start on" in said and families(pair_of(both)) == ["mtp"]
    file.unlink()
    file.mkdir()
    pair = pair_of(both)
    assert families(pair) == ["dflash", "dflash"]
    assert "cannot be kept" in [*comparing(pair)][-1]


def test_speeds_that_are_no_numbers_from_0_on_are_damage(both, file):
    for wrong in (float("nan"), float("inf"), -1.0):
        write(file, both, 1.0, wrong)
        assert families(pair_of(both)) == ["dflash", "dflash"]


def test_a_file_of_other_drafters_counts_for_nothing(both, file):
    write(file, both, 1.0, 2.0)
    file.write_text(file.read_text().replace(both["model"] + '", 2.0', 'owner/other", 2.0'))
    pair = pair_of(both)
    assert families(pair) == ["dflash", "dflash"] and not pair.speeds.found and not pair.notes


def test_a_folder_that_cannot_be_written_is_told(both, file, monkeypatch):
    plant(monkeypatch, 1.7, 2.1)
    file.parent.write_text("a file where the folder should be")
    [*_, said] = comparing(pair_of(both))
    assert "cannot be kept" in said and families(pair_of(both)) == ["dflash", "dflash"]


def test_where_one_takes_more_than_half_of_the_memory_left_nothing_is_compared(
    both, file, monkeypatch
):
    needs = check_drafter(find_source(both["model"], DRAFTER)).weights.memory(on_cpu=True)
    plant(monkeypatch, 0.9, 2.1)
    monkeypatch.setattr(quick, "free_memory", lambda: 2 * needs - 2)
    assert [*comparing(pair_of(both))] == [] and not file.exists(), "the next start tries again"
    monkeypatch.setattr(quick, "free_memory", lambda: 2 * needs)
    [*_, said] = comparing(pair_of(both))
    assert "2.10" in said and families(pair_of(both)) == ["mtp"]


def test_a_draft_model_that_is_of_another_family_than_was_said_compares_nothing(both, file):
    pair = replace(pair_of(both), further=lambda family: [])
    assert [*comparing(pair)] == [] and not file.exists()


def test_a_target_that_would_have_to_be_widened_stays_as_it_is(both, file, monkeypatch):
    plant(monkeypatch, 0.9, 2.1)
    pair = pair_of(both)
    monkeypatch.setattr(loading, "fits_target", lambda target, layers: False)
    monkeypatch.setattr(Target, "widen", lambda *_: pytest.fail("widened"))
    assert [*comparing(pair)] == [] and not file.exists()
    with pytest.raises(DFlashError, match="start again with drafter="):
        pair.of("mtp")


def test_a_method_that_was_measured_for_the_registry_is_not_asked_again(both, file, monkeypatch):
    write(file, both, 1.0, 2.0)
    known = Entry(("owner/tiny",), both["drafter"], both["second"], method="ddtree")
    monkeypatch.setattr(names, "entries", lambda: (known,))
    pair = pair_of(both)
    assert families(pair) == ["dflash", "dflash"] and pair.speeds is None
    assert [*comparing(pair, again=True)] == []


def test_where_the_fastest_is_gone_the_other_drafts(both, file, monkeypatch):
    write(file, both, 1.0, 2.0)
    gone = choice.is_here
    monkeypatch.setattr(choice, "is_here", lambda name, o: name != both["model"] and gone(name, o))
    pair = pair_of(both)
    assert families(pair) == ["dflash", "dflash"] and pair.speeds is None
    assert [*comparing(pair)] == []


def test_the_chat_gets_and_the_server_says_what_was_found(both, file, monkeypatch, capsys):
    plant(monkeypatch, 1.7, 2.1)
    monkeypatch.setattr(Pair, "calibrating", lambda pair, again: iter([(1, 1)]))
    backend = Backend()
    (loaded,) = backend.load(PairConfig(both["model"]))
    _, timing, *steps, said = backend.measure(False)
    assert isinstance(timing, Timing), "before drafters are compared"
    assert {*steps} == {None} and both["model"] in said
    file.unlink()
    _ = [*running._measure(DecodeConfig(), loaded.pair)]
    assert f"{running.PROGRAM}: {said}" in capsys.readouterr().err
    file.unlink()
    events = backend.measure(False)
    _ = next(events), next(events), next(events)
    _ = [*backend.load(PairConfig(both["model"]))]
    assert [*events] == [] and not file.exists(), "another pair was loaded meanwhile"


def test_the_pair_s_line_and_the_doctor_say_why(both, file):
    write(file, both, 1.7, 2.1)
    report = "\n".join(lines(check_named(PairConfig(both["model"]))))
    assert f"drafter  {both['model']}" in report
    assert "2.10 times plain decoding" in report and "1.70 times plain decoding" in report
    told = "\n".join(doctor.about(file.parents[1]))
    assert "mtp, 2.10 times plain decoding" in told and "unreadable" not in told


def test_speeds_are_of_a_target_and_of_settings():
    target = describe_target({"hidden_size": 64}, "owner/one")
    files = {
        SPEEDS_FILE(target, PairConfig()),
        SPEEDS_FILE(target, PairConfig("anything", template=("a=1",))),
        SPEEDS_FILE(describe_target({"hidden_size": 64}, "owner/two"), PairConfig()),
        SPEEDS_FILE(describe_target({"hidden_size": 32}, "owner/one"), PairConfig()),
        SPEEDS_FILE(target, PairConfig(drafter_bits=4)),
    }
    assert len(files) == 4


def test_of_three_the_fastest_is_told_against_all_others(tmp_path):
    known = [("dflash", "A"), ("mtp", "B"), ("lm", "C")]
    speeds = Speeds(tmp_path / "x.json", "T", tuple(known)).stored()
    assert speeds.best is None and speeds.told() == ""
    said = speeds.keep([1.5, 0.9, 1.9])
    assert said.startswith("from the next start on C (lm, 1.90 times plain decoding)")
    known[0] = ("", "A")
    again = Speeds(tmp_path / "x.json", "T", tuple(reversed(known))).stored()
    assert again.best == ("lm", "C", 1.9) and ("dflash", "A") in again.drafters
