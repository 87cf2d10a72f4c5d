"""A draft model adapts to conversations: only what helps stays, and nobody hears of it."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks import adapter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair, load_target
from dflash_mlx.session.session import generate
from dflash_mlx.train import adapt
from dflash_mlx.train.adapt import Adaptation, main
from dflash_mlx.train.rows import CHAT, conversation_rows
from support.tiny_training import Place, arrays_of, greedy_rows, make_trainee

SECRET = "swordfish"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path / "user")


@pytest.fixture
def pair(place) -> Pair:
    return load_target(str(place.model))


def talk(folder: Path, pair: Pair, turns: int = 2, **head: Any) -> Path:
    """A conversation as the chat keeps it."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{len(list(folder.iterdir()))}.jsonl"
    lines: list[dict[str, Any]] = [{"format": CHAT, "model": pair.target.name, **head}]
    for i in range(turns):
        lines.append({"role": "user", "content": f"{SECRET} {i}?"})
        lines.append({"role": "assistant", "content": f"answer {i}", "ending": "stop"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def adaptation(place: Place, pair: Pair, rows: int = 50) -> Adaptation:
    return Adaptation(pair, place.drafter(), greedy_rows(rows, 20) if rows else (), 0.01)


def finish(adaptation: Adaptation) -> list[str]:
    return [*iter(adaptation.step, "")]


# Conversations


def test_rows_are_the_answers_of_this_target_behind_all_that_was_said(tmp_path, pair):
    talk(tmp_path / "talks", pair)
    talk(tmp_path / "talks", pair, model="another")
    talk(tmp_path / "talks", pair, format="another")
    first, second = conversation_rows(tmp_path / "talks", pair)
    told = pair.tokenizer.decode(second.prompt)
    assert told.endswith("assistant\n") and f"{SECRET} 1?" in told and "answer 0" in told
    assert pair.tokenizer.decode(second.answer) == "answer 1<|im_end|>"
    assert second.temperature > 0 and len(first.prompt) < len(second.prompt)


@pytest.mark.parametrize("damage", [b'{"role": "assi', b"\xff\n", b"3\n", b'{"role": "user"}\n'])
def test_a_damaged_conversation_is_told_to_nobody_and_the_others_count(damage, pair, place, capfd):
    file, whole = (talk(place.root / "talks", pair) for _ in range(2))
    with file.open("ab") as out:
        out.write(damage)
    rows = [*conversation_rows(file.parent, pair)]
    assert [row.id for row in rows if row.id.startswith(whole.stem)] == ["1-1", "1-3"]
    assert not any(SECRET in text for text in capfd.readouterr())


def test_an_answer_that_was_cut_has_no_end_and_an_empty_one_teaches_nothing(tmp_path, pair):
    file = talk(tmp_path / "talks", pair)
    text = file.read_text().replace(
        '"answer 0", "ending": "stop"', '"answer 0", "ending": "length"'
    )
    file.write_text(text.replace("answer 1", ""))
    (row,) = conversation_rows(file.parent, pair)
    assert pair.tokenizer.decode(row.answer) == "answer 0"


def test_a_folder_of_conversations_is_a_corpus_whose_features_its_owner_alone_sees(place, pair):
    for _ in range(3):
        talk(place.root / "talks", pair)
    place.train(corpus=place.root / "talks", steps=1)
    assert len(place.history()) == 2
    (folder,) = place.cache.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# The delta


def trained(network: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(network.trainable_parameters()))


def changed(file: Path, network: Any) -> Any:
    """The network with a random delta beside it, which is kept; outputs stay of usual size."""
    adapter.attach(file, network)
    delta = [(n, 0.05 * mx.random.normal(a.shape)) for n, a in trained(network).items()]
    network.update(tree_unflatten(delta))
    adapter.keep(file, network)
    return network


def same(one: Any, other: Any) -> bool:
    first, second = arrays_of(one), arrays_of(other)
    return first.keys() == second.keys() and all(
        np.allclose(array, second[name], atol=1e-4) for name, array in first.items()
    )


def test_a_delta_of_zero_changes_nothing_and_a_fused_one_drafts_as_an_attached_one(tmp_path):
    file, x = tmp_path / "new" / "delta.safetensors", mx.random.normal((1, 3, 64))
    attached, fused = make_trainee().network, make_trainee().network
    plain = np.array(attached.layers[0].mlp(x))
    adapter.attach(file, attached)
    assert np.array_equal(np.array(attached.layers[0].mlp(x)), plain)
    assert all("lora" in name for name in trained(attached)) and "fc.lora_a" in trained(attached)
    changed(file, attached := make_trainee().network)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and adapter.add_to(fused, file)
    found = np.array(fused.layers[0].mlp(x))
    assert np.allclose(found, np.array(attached.layers[0].mlp(x)), rtol=1e-3, atol=1e-3)
    assert not np.allclose(found, plain, atol=1e-2)
    again = make_trainee().network
    adapter.attach(file, again)
    assert same(again, attached), "the next adaptation goes on from it"


def test_undo_goes_back_one_adaptation_and_then_to_what_was_published(tmp_path):
    file, (first, second) = tmp_path / "delta.safetensors", (make_trainee().network for _ in "12")
    changed(file, first)
    changed(file, second)
    adapter.undo(file)
    adapter.attach(file, now := make_trainee().network)
    assert same(now, first) and not same(now, second)
    adapter.undo(file)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(DFlashError, match="nothing was adapted"):
        adapter.undo(file)


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "name"])
def test_a_delta_that_cannot_be_used_is_told_and_the_published_drafter_drafts(damage, tmp_path):
    file = tmp_path / "delta.safetensors"
    changed(file, make_trainee().network)
    whole, arrays = file.read_bytes(), dict(mx.load(str(file)))
    name = next(iter(arrays))
    if damage in ("cut", "text"):
        file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"nothing")
    else:
        wrong = {name: mx.zeros((3, 8))} if damage == "shape" else {f"x.{name}": arrays[name]}
        mx.save_safetensors(str(file), wrong)
    other = make_trainee().network
    assert str(file) in (told := adapter.add_to(other, file)) and "--undo" in told
    assert same(other, make_trainee().network)


def test_two_targets_and_two_drafters_have_deltas_of_their_own(place):
    one, other = place.drafter(), place.root / "other"
    other.mkdir()
    weights = bytearray((one / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert len({adapter.file_of(*of) for of in ((one, "a"), (one, "b"), (other, "a"))}) == 3


# An adaptation


@pytest.mark.parametrize(
    ("gains", "is_kept"),
    [((0.1, 0.12, 0.09, 0.11), True), ((0.5, -0.4, 0.3, -0.2), False), ((0,) * 4, False),
     ((-0.1, -0.12, -0.09, -0.11), False)],
)  # fmt: skip
def test_only_what_helps_on_held_out_answers_beyond_chance_is_kept(
    gains, is_kept, place, pair, monkeypatch
):
    seen: list[int] = []

    def measured(trainee: Any, texts: Any, anchors: int) -> Any:
        (text,) = texts.texts
        first = text.number not in seen
        seen.append(text.number)
        place = len(set(seen)) if first else seen.index(text.number)
        return np.array([[0.25 + (not first) * gains[place % 4], 0.0]])

    monkeypatch.setattr(adapt, "measure", measured)
    found = adaptation(place, pair)
    done = finish(found)
    assert found.kept == is_kept == found.file.exists() and "1.25 to" in found.told
    assert {number % adapt.HELD_OUT for number in seen} == {0} and len(set(seen)) >= adapt.LEAST
    steps = {each.partition(",")[0] for each in done}
    assert steps == {"opening", "reading", "training", "measuring"}


def test_training_goes_down_and_the_target_stays_as_it_is(place, pair, monkeypatch):
    losses: list[float] = []
    step, steps = adapt.Trainer.train_step, partial(adapt.TrainConfig, steps=120)
    monkeypatch.setattr(
        adapt.Trainer, "train_step", lambda self: losses.append(step(self)) or losses[-1]
    )
    monkeypatch.setattr(adapt, "TrainConfig", lambda minutes, **given: steps(**given))
    monkeypatch.setitem(adapt._TRAINING, "warmup", 2)
    monkeypatch.setitem(adapt._TRAINING, "learning_rate", 5e-3)
    before = arrays_of(pair.target.model)
    finish(adaptation(place, pair))
    assert len(losses) == 120 and np.mean(losses[-30:]) < np.mean(losses[:30]) - 0.15
    after = arrays_of(pair.target.model)
    assert all(np.array_equal(after[name], array) for name, array in before.items())


def test_without_minutes_it_takes_six_steps_an_answer(place, pair, monkeypatch):
    steps: list[int] = []

    def train_step(self: Any) -> float:
        self.step += 1
        steps.append(self.step)
        return 0.0

    monkeypatch.setattr(adapt.Trainer, "train_step", train_step)
    done = finish(Adaptation(pair, place.drafter(), greedy_rows(50, 20)))
    held_out = sum(each.startswith("measuring") for each in done) // 2
    assert len(steps) == 6 * (50 - held_out)


def test_too_few_answers_are_a_sentence(place, pair):
    for count in (0, 9):
        with pytest.raises(DFlashError, match=f"{count} answers of"):
            finish(adaptation(place, pair, count))


def test_a_time_that_is_none_is_refused_before_anything_is_read(place, pair):
    for minutes in (-1.0, float("nan")):
        with pytest.raises(DFlashError, match="minutes"):
            Adaptation(pair, place.drafter(), iter(lambda: pytest.fail("it reads"), 0), minutes)


def test_a_disk_that_says_no_is_a_sentence(place, pair, tmp_path):
    (tmp_path / "adapters").write_text("in the way")
    network = adapt.open_trainee(place.drafter(), pair).network
    with pytest.raises(DFlashError, match="cannot be written"):
        adapter.keep(tmp_path / "adapters" / "delta.safetensors", network)


def test_a_drafter_that_learns_from_greedy_answers_alone_is_refused(place, pair):
    from support.masked_formats import small

    small(place.root / "masked", pair.target)
    with pytest.raises(DFlashError, match="masked"):
        finish(Adaptation(pair, place.root / "masked", greedy_rows(50, 20), 0.01))


# The commands


def test_a_pair_drafts_with_a_delta_where_it_is_asked_to_and_answers_the_same(place, pair):
    folder = place.drafter()
    trainee = adapt.open_trainee(folder, pair)
    changed(adapter.file_of(folder, pair.target.name), trainee.network)
    config = PairConfig(str(place.model), str(folder))
    published, adapted = load_pair(config), load_pair(replace(config, adapted=True))
    assert any("adapted" in note for note in adapted.notes) and not published.notes
    assert not same(published.drafters[0].module, adapted.drafters[0].module)
    asked = DecodeConfig(max_tokens=20)
    assert generate(published, "hello", asked).tokens == generate(adapted, "hello", asked).tokens


def test_the_command_adapts_undoes_and_keeps_texts_to_itself(place, pair, monkeypatch, capfd):
    for _ in range(30):
        talk(place.root / "talks", pair)
    values = iter(np.arange(10000) / 10)
    monkeypatch.setattr(adapt, "measure", lambda *_, **__: np.array([[next(values), 0.0]]))
    words = ["--model", str(place.model), "--drafter", str(place.drafter())]
    main([*words, "--corpus", str(place.root / "talks"), "--minutes", "0.01"])
    said = capfd.readouterr()
    assert "--undo" in said.out and SECRET not in said.out + said.err
    file = adapter.file_of(place.root / "drafter", pair.target.name)
    assert file.exists()
    main([*words, "--undo"])
    assert not file.exists()
    with pytest.raises(DFlashError, match="nothing was adapted"):
        main([*words, "--undo"])
    with pytest.raises(DFlashError, match="0 answers of"):  # nobody has talked yet
        main(words)
