"""Walking a known answer counts what decoding it counts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.benchmark.selection import read_methods
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.observer import Observer
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.decode import prefill
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.target.model import Target
from dflash_mlx.train.corpus.rows import CorpusRow
from support.decoding import rounds as decode
from support.families import make_model
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder

SCRIPTS = Path(__file__).parents[2] / "scripts"
METHODS = "dflash,dflash:3,d2sd:growth=paper,d2sd:budget=12,ddtree:budget=7,ngram"
PROMPT = [5, 9, 5, 9, 5, 3]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("simulate_trees")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    networks = []
    for seed, taps in ((1, [0, 2]), (2, [0, 2])):
        folder = tmp_path_factory.mktemp("drafter")
        config = tiny_drafter_config(
            num_target_layers=3, dflash_config={"mask_token_id": 5, "target_layer_ids": taps}
        )
        write_drafter_folder(folder, config, random_drafter(config, seed))
        read = read_config(folder)
        networks.append((load_network(folder, read, mx.float32), read))
    (first, config), (second, other) = networks
    return Pair(Target(make_model("llama"), 200, "tiny"), None, first, config, "x", second, other)


def decoded(pair, config):
    """The rounds of decoding: tokens and rows of each."""
    drafter = make_drafter(pair, config)
    state = State(pair.target.new_cache(), drafter.new_context())
    prefill(pair.target, drafter, state, PROMPT, config, Observer())
    rounds = list(decode(pair.target, drafter, state, config, Observer()))
    answer = [token for accepted in rounds for token in accepted.tokens]
    return answer, [(len(accepted.path), len(accepted.tree)) for accepted in rounds]


def test_simulated_rounds_are_those_of_decoding(script, pair):
    config = DecodeConfig(max_tokens=60)
    methods = {n: c for n, c in read_methods(METHODS, config).items() if n != "none"}
    answer, _ = decoded(pair, DecodeConfig(method="none", max_tokens=60))
    row = CorpusRow("a", "math", tuple(PROMPT), tuple(answer), 0.0)
    with script.remembering() as memory:
        counts = script.simulate(pair, dict(script.made(pair, methods)), [row, row], memory)
    assert set(counts) == {*methods, "d2sd:growth=paper alone", "d2sd:budget=12 alone"}
    for name, method in methods.items():
        found, rounds = decoded(pair, method)
        assert found == answer
        assert counts[name].rounds["math"] == 2 * len(rounds)
        assert counts[name].tokens["all"] == 2 * sum(tokens for tokens, _ in rounds)
        assert counts[name].rows["all"] == 2 * sum(rows for _, rows in rounds)
    assert counts["ngram"].tokens["all"] > counts["ngram"].rounds["all"], "something was accepted"


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--methods", "none"], "'none'"),
        (["--methods", "d2sd"], "'d2sd'"),
        (["--methods", "ddtree:4"], "'ddtree:4'"),
        (["--methods", "dflash", "--every", "0"], "--every is 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(script, options, value):
    with pytest.raises(DFlashError, match=value):
        script.main(["--corpus", "none", *options])
