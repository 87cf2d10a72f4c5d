"""A method with a network of its own: this file and one line in the table, and all know it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_chat.labels import DRAFTS, label_of
from dflash_chat.naming import legend, method_name, source_style
from dflash_chat.settings_screen import SettingsScreen
from dflash_mlx import doctor
from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.benchmark.selection import read_methods
from dflash_mlx.cli import generate as generating
from dflash_mlx.client import PairConfig, Session, load_pair, method_choices
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError, Finding
from dflash_mlx.core.option import Given, Options, option
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.formats import FileFormat
from dflash_mlx.drafters.method import BlockDrafter, Method, Plan, TokenSource
from dflash_mlx.drafters.methods import METHODS, check_given, settle
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Capabilities
from dflash_mlx.engine.state import State
from dflash_mlx.models import names
from dflash_mlx.models.names import Entry
from dflash_mlx.verifier.model import Target
from support.families import VOCAB_SIZE
from support.models import write_drafter, write_model

# The drafter: a network that reads the last committed tokens and no features.


class Bigrams(nn.Module):
    """Logits [V] after a token."""

    def __init__(self) -> None:
        super().__init__()
        self.after = mx.zeros((VOCAB_SIZE, VOCAB_SIZE))


class Seen(NoContext):
    """Counts the committed tokens."""

    kind = (), "toy"

    def __init__(self, length: int = 0) -> None:
        self.length = length

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        assert features is None
        self.length += tokens.shape[0]

    def trim(self, length: int) -> None:
        self.length = min(self.length, length)

    def fork(self) -> Seen:
        return Seen(self.length)

    def restore(self, saved: Any, tokens: mx.array) -> None:
        self.length = len(tokens)


@dataclass(frozen=True)
class ToyModel:
    """A `DraftModel`."""

    module: Bigrams
    family = "toy"
    block_size = 4
    aux_layers: tuple[int, ...] = ()

    def new_context(self) -> Seen:
        return Seen()

    def limit_vocabulary(self, target: Target, tokens: Any, size: int) -> None:
        pass

    def try_out(self, context: Any) -> mx.array:
        return self.module.after[mx.array([0])]


class ToyDrafter(BlockDrafter[ToyModel]):
    """Greedy bigrams behind the anchor."""

    name, stride = "toy", 1

    def draft_block(self, state: State, rows: int) -> Proposal:
        assert state.context.length == state.position
        token, drafts = state.anchor, []
        for _ in range(rows - 1):
            for _ in range(self.stride):
                token = mx.argmax(self._model.module.after[token], axis=-1)
            drafts.append(token.item())
        return Proposal(Tree.chain().merge(drafts, [-0.1] * len(drafts), "bigram"))


# Its files


@dataclass(frozen=True)
class ToyConfig:
    block_size: int = 4
    vocab_size: int = VOCAB_SIZE
    aux_layers: tuple[int, ...] = ()
    quantization = None
    notes: tuple[str, ...] = ()

    def layers_read(self, layers: int) -> tuple[int, ...]:
        return ()


class ToyFiles(FileFormat):
    model = ToyModel

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("model_type") == "toy"

    def parse_config(self, raw: Any, source: str, names: Collection[str] = ()) -> ToyConfig:
        return ToyConfig()

    def check_tensors(
        self, tensors: Mapping[str, Any], config: ToyConfig, source: str
    ) -> Iterator[Finding]:
        if set(tensors) != {"after"}:
            yield Finding("error", f"{source} has {sorted(tensors)}", "give bigrams")

    def misfits(
        self, config: ToyConfig, target: Mapping[str, Any], name: str, drafter: str
    ) -> Iterator[Finding]:
        if target.get("vocab_size") != VOCAB_SIZE:
            yield Finding("error", f"{drafter} has other tokens than {name}", "choose another")

    def load(
        self, folder: Path, config: ToyConfig, target: Target, settings: PairConfig
    ) -> ToyModel:
        network = Bigrams()
        network.load_weights(str(folder / "model.safetensors"))
        return ToyModel(network)


@dataclass(frozen=True)
class ToyOptions(Options):
    """The options of `toy`, which no other file knows."""

    stride: int = option(
        1,
        "letters from one draft to the next",
        label="Letters at a stride",
        least=1,
        most=9,
        type=int,
    )


def make(how: Plan) -> ToyDrafter:
    (model,) = how.models
    assert isinstance(model, ToyModel)
    assert isinstance(how.config.options, ToyOptions)
    drafter = ToyDrafter(model)
    drafter.stride = how.config.options.stride
    return drafter


METHOD = Method(
    "toy",
    "toy bigrams",
    make,
    ToyOptions,
    files=ToyFiles(),
    best_with=1,
    sources=(TokenSource("bigram", "bigram", "secondary"),),
    preference=9,
)


# One line in the table


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, METHOD.name, METHOD)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A target and a toy drafter that knows the letters of the alphabet."""
    model, drafter = write_model(tmp_path / "model"), tmp_path / "toy"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"model_type": "toy"}))
    after = np.roll(np.eye(VOCAB_SIZE, dtype=np.float32), 1, axis=1)
    save_file({"after": after}, drafter / "model.safetensors")
    return ["--model", str(model), "--drafter", str(drafter)]


def test_auto_takes_it_and_answers_are_plain_decodings(folders):
    pair = load_pair(PairConfig(folders[1], folders[3]))
    assert [model.family for model in pair.drafters] == ["toy"]
    prompt, answers = list(range(30, 50)), {}
    for method in ("auto", "none"):
        session = Session(pair, DecodeConfig(method, max_tokens=30))
        deltas = list(session.stream(prompt))
        answers[session.config.method] = [token for delta in deltas for token in delta.tokens]
    assert answers["toy"] == answers["none"]


def test_the_command_line_answers_with_it(folders, capsys):
    assert "toy" in method_choices()
    for stride in ("1", "5"):
        given = ["--method", "toy", "--stride", stride, "--max-tokens", "5"]  # one safe round
        generating.main([*folders, *given, "--prompt", "abc", "--json"])
        said = json.loads(capsys.readouterr().out)
        assert said["method"] == "toy" and said["rounds"] > 0
        assert len(said["accepted_by_position"]) == 3
    assert "toy: letters from one draft to the next" in generating.parser().format_help()


def test_an_option_of_its_own_is_refused_with_other_values_and_for_other_methods():
    for method, value, said in (
        ("toy", 10, "stride is 10; choose 1 to 9"),
        ("dflash", 2, "stride is 2, but dflash does not use it; .*that does: toy"),
    ):
        with pytest.raises(DFlashError) as refused:
            check_given(DecodeConfig(method, options=Given.of(stride=value)))
        assert re.fullmatch(said, str(refused.value)), str(refused.value)
    chosen = settle(DecodeConfig(options=Given.of(stride=2)), Capabilities(("dflash", "toy")))
    assert (chosen.method, chosen.options) == ("toy", ToyOptions(2))


def test_an_option_of_its_own_goes_behind_the_name_and_is_a_setting_of_the_chat():
    (named,) = [*read_methods("toy:stride=3", DecodeConfig()).values()][1:]
    assert named.options == ToyOptions(3)
    screen = SettingsScreen(DecodeConfig(options=Given.of(stride=4)), {})
    groups = dict(screen._groups())
    assert "stride" in groups[DRAFTS] and screen._fields["stride"][1] == 4
    assert label_of("stride") == "Letters at a stride"


def test_the_benchmark_compares_it(folders, tmp_path, capsys):
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    row = {"id": "1", "category": "a", "messages": [{"role": "user", "content": "abcabc"}]}
    prompts.write_text(json.dumps(row) + "\n")
    more = ["--methods", "toy", "--max-tokens", "8", "--json", str(report)]
    benchmark.main([*folders, "--prompts", str(prompts), *more])
    figures = json.loads(report.read_text())["methods"]
    assert figures["toy"]["parity"] == 1.0 and "toy" in capsys.readouterr().out


def test_the_chat_names_it_and_draws_its_tokens_in_its_colour():
    assert method_name("toy", Capabilities()) == "toy bigrams"
    assert ("bigram", "bigram") in legend()
    assert source_style("bigram") == "$text-secondary on $secondary-muted"


def test_the_doctor_shows_its_pair(folders, capsys):
    doctor.main(folders)
    out = capsys.readouterr().out
    assert "can be used" in out and "blocks of 4\n" in out


def test_other_methods_refuse_its_draft_model_and_it_refuses_theirs(folders, tmp_path):
    pair = load_pair(PairConfig(folders[1], folders[3]))
    with pytest.raises(DFlashError, match="ddtree needs a drafter of the dflash family"):
        Session(pair, DecodeConfig("ddtree"))
    dflash = load_pair(PairConfig(folders[1], str(write_drafter(tmp_path / "dflash"))))
    with pytest.raises(DFlashError, match="toy needs a drafter of the toy family"):
        Session(dflash, DecodeConfig("toy"))


class TestTheRegistryKnowsDraftersOfTwoFamilies:
    """The first is DFlash's; the toy is among the others."""

    @pytest.fixture(autouse=True)
    def known(self, folders, tmp_path, monkeypatch):
        self.model, toy = folders[1], folders[3]
        self.dflash = str(write_drafter(tmp_path / "dflash"))
        entry = Entry((self.model,), self.dflash, others=(("toy", toy),))
        monkeypatch.setattr(names, "entries", lambda: (entry,))

    def families(self, *methods):
        pair = load_pair(PairConfig(self.model), *map(DecodeConfig, methods))
        return pair, [model.family for model in pair.drafters]

    def test_what_is_asked_for_is_loaded_and_nothing_else(self):
        assert self.families()[1] == self.families("auto")[1] == ["dflash"]
        assert self.families("toy")[1] == ["toy"]
        assert self.families("toy", "dflash")[1] == ["dflash", "toy"]
        assert self.families("none")[1] == []

    @pytest.mark.parametrize(("first", "then"), [("toy", "dflash"), ("dflash", "toy")])
    def test_the_other_family_is_loaded_when_a_method_asks_for_it(self, first, then):
        pair, families = self.families(first)
        assert families == [first]
        session = Session(pair, DecodeConfig(then, max_tokens=5))
        assert len(collect(session.stream(list(range(30, 50)))).tokens) == 5
        (model,) = pair.of(then)
        assert model.family == then and pair.of(then) == [model], "once"

    def test_one_that_does_not_fit_is_refused_before_its_weights_are_read(self, folders):
        pair, _ = self.families("dflash")
        (Path(folders[3]) / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(DFlashError):
            Session(pair, DecodeConfig("toy"))
