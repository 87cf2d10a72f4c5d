"""Our drafters as z-lab's own MLX module reads them (PyPI: dflash 0.1.0; see CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from dflash_mlx.drafters.selected import SelectedPath

import dflash_mlx
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.engine.state import State
from dflash_mlx.target.model import Target
from dflash_mlx.target.sequence import SequenceCache
from dflash_mlx.train.maps import EmbeddingRows, MappedSelector, with_selector
from dflash_mlx.train.trainee import Trainee
from support import reference_dflash2
from support.families import make_model
from support.models import drafter_config
from support.reference_dflash import random_drafter, write_drafter_folder
from support.tiny_training import make_network

published: Any = pytest.importorskip(
    "dflash.model_mlx", reason="scripts/test installs dflash==0.1.0 (see CONTRIBUTING.md)"
)

DATA = Path(dflash_mlx.__file__).parent / "data"
TOLERANCE = 1e-4


class Tables:
    """A target as far as both programs need one: an embedding and a head."""

    kernels = kv_bits = None

    def __init__(self, vocabulary: int, d: int) -> None:
        rng = np.random.default_rng(0)
        self.model = nn.Module()  # where a target's other modules are
        self.embed_tokens = nn.Embedding(vocabulary, d)
        self.embed_tokens.weight = mx.array(rng.normal(size=(vocabulary, d)), dtype=mx.float32)
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        self.lm_head.weight = mx.array(rng.normal(size=(vocabulary, d)) / d**0.5, dtype=mx.float32)

    def embedding(self) -> nn.Embedding:
        return self.embed_tokens

    def head(self) -> nn.Linear:
        return self.lm_head

    def tap(self, layers: tuple[int, ...]) -> None:
        pass


class Both:
    """One drafter folder, read by them and by us, in float32."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = read_config(folder)
        self.tables = Tables(self.config.vocab_size, self.config.hidden_size)
        monkeypatch.setattr(published, "snapshot_download", lambda name, **_: name)
        self.theirs = published.load_draft(str(folder))
        self.theirs.set_dtype(mx.float32)
        self.theirs.bind(SimpleNamespace(model=self.tables, lm_head=self.tables.lm_head))
        network: Any = load_network(folder, self.config, mx.float32)
        tables: Any = self.tables
        self.ours = BlockModel(network, self.config, tables)

    def features(self, length: int) -> mx.array:
        width = self.config.hidden_size * len(self.config.target_layer_ids)
        rows = np.random.default_rng(length).normal(size=(length, width))
        return mx.array(rows.astype(np.float32))

    def block(self, anchor: int) -> mx.array:
        masks = [self.config.mask_token_id] * (self.config.block_size - 1)
        return mx.array([[anchor, *masks]])

    def state(self, features: mx.array, anchor: int) -> State:
        state = State(SequenceCache([]), self.ours.new_context())
        state.context.append(features)
        state.set_anchor(anchor)
        return state


@pytest.mark.parametrize("name", ["smollm2-135m-dflash", "smollm2-135m-variable-prefix"])
@pytest.mark.parametrize(("length", "anchor"), [(1, 5), (33, 4000), (300, 49151)])
def test_a_shipped_drafter_gives_the_reference_the_same_block_logits(
    monkeypatch, name, length, anchor
):
    both = Both(DATA / name, monkeypatch)
    features = both.features(length)
    theirs = both.theirs(
        both.block(anchor), features[None], both.theirs.make_cache(), logits_start=1
    )
    context = both.ours.new_context()
    context.append(features)
    ours = both.ours.logits(context, mx.array([anchor]), both.config.block_size)
    assert ours.shape == theirs[0].shape
    assert float(mx.abs(ours - theirs[0]).max()) < TOLERANCE
    assert float(mx.abs(ours).max()) > 1


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": WINDOWS,
    "sliding, not causal": {**WINDOWS, "is_causal": False},
    "causal": {"is_causal": True},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("length", [5, 33])
def test_windows_and_scaled_ropes_give_the_reference_the_same_block_logits(
    monkeypatch, tmp_path, name, length
):
    raw = drafter_config(**LAYOUTS[name])
    write_drafter_folder(tmp_path, raw, random_drafter(raw))
    both = Both(tmp_path, monkeypatch)
    features = both.features(length)
    theirs = both.theirs(both.block(7), features[None], both.theirs.make_cache(), logits_start=1)[0]
    state = both.state(features, 7)
    ours = both.ours.logits(state.context, state.anchor, both.config.block_size)
    assert float(mx.abs(ours - theirs).max()) < TOLERANCE
    assert float(mx.abs(ours).max()) > 1


@pytest.mark.parametrize(
    ("family", "scale"), [("llama", 1.0), ("gemma3_text", 1.0), ("gemma4_text", 8.0)]
)
def test_a_target_s_own_embedding_scale_is_applied_as_the_reference_does(
    monkeypatch, tmp_path, family, scale
):
    """Gemma 3 multiplies by 8 too, in its forward pass, which the reference does not see."""
    raw = drafter_config()
    write_drafter_folder(tmp_path, raw, random_drafter(raw))
    model = make_model(family)
    both = Both(tmp_path, monkeypatch)
    both.theirs.bind(model)
    assert both.theirs.embed_scale == scale
    network: Any = load_network(tmp_path, both.config, mx.float32)
    ours = BlockModel(network, both.config, Target(model, 512, family))
    features = both.features(20)
    theirs = both.theirs(both.block(7), features[None], both.theirs.make_cache(), logits_start=1)[0]
    context = ours.new_context()
    context.append(features)
    logits = ours.logits(context, mx.array([7]), both.config.block_size)
    assert float(mx.abs(logits - theirs).max()) < TOLERANCE
    assert float(mx.abs(logits).max()) > 0.5


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_second_version_gives_the_reference_the_same_logits_and_path(
    monkeypatch, tmp_path, is_causal
):
    scales = {"final_logit_softcapping": 9.0, "output_multiplier": 0.7}
    raw = reference_dflash2.tiny_config(dflash_config=scales, is_causal=is_causal)
    write_drafter_folder(tmp_path, raw, reference_dflash2.random_tensors(raw))
    both = Both(tmp_path, monkeypatch)
    for length, anchor in ((1, 3), (20, 7), (90, 96)):
        features = both.features(length)
        block = both.block(anchor), features[None]
        theirs = both.theirs(*block, both.theirs.make_cache(), logits_start=1)
        path, _, _ = both.theirs.propose(*block, both.theirs.make_cache(), 0.0, logits_start=1)
        state = both.state(features, anchor)
        ours = both.ours.logits(state.context, state.anchor, both.config.block_size)
        assert float(mx.abs(ours - theirs[0]).max()) < TOLERANCE
        model: Any = both.ours
        assert SelectedPath(model).propose(state, 100).tokens.tolist() == [
            anchor,
            *path[0].tolist(),
        ]


def test_a_drafter_that_was_given_a_selector_has_the_reference_s_logits_and_path(
    monkeypatch, tmp_path
):
    raw = drafter_config()
    network, config = make_network(raw)
    both = Tables(config.vocab_size, config.hidden_size)
    tables: Any = both
    rows = EmbeddingRows(both.embedding(), config.vocab_size)
    maps = MappedSelector(config.hidden_size, 8, rows, seed=0)
    maps.predecessor = maps.predecessor * 30  # so that it changes paths
    trainee = Trainee(network, config, raw, tables)
    with_selector(trainee, maps, SelectorConfig(8, 5)).save(tmp_path)
    pair, detours = Both(tmp_path, monkeypatch), 0
    for length, anchor in ((1, 3), (20, 7), (90, 96)):
        features = pair.features(length)
        block = pair.block(anchor), features[None]
        theirs = pair.theirs(*block, pair.theirs.make_cache(), logits_start=1)[0]
        path, _, _ = pair.theirs.propose(*block, pair.theirs.make_cache(), 0.0, logits_start=1)
        state = pair.state(features, anchor)
        ours = pair.ours.logits(state.context, state.anchor, pair.config.block_size)
        assert float(mx.abs(ours - theirs).max()) < TOLERANCE
        model: Any = pair.ours
        tokens = SelectedPath(model).propose(state, 100).tokens.tolist()
        assert tokens == [anchor, *path[0].tolist()]
        detours += tokens[1:] != mx.argmax(ours, axis=-1).tolist()
    assert detours
