"""Our drafters as z-lab's own MLX module reads them (PyPI: dflash 0.1.0; see CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import dflash_mlx
from dflash_mlx.drafters.block_diffusion import SelectedPath
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.selector import MappedSelector, with_selector
from dflash_mlx.verifier.model import Target
from support import reference_dflash2
from support.decoding import behind
from support.families import make_model
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash import tiny_drafter_config as drafter_config
from support.tiny_training import make_trainee

published: Any = pytest.importorskip(
    "dflash.model_mlx", reason="scripts/test installs dflash==0.1.0 (see CONTRIBUTING.md)"
)

DATA = Path(dflash_mlx.__file__).parent / "data"
TOLERANCE = 1e-4


class Tables:
    """A target as far as both programs need one: an embedding and a head."""

    kernels = kv_bits = None
    num_layers = 0  # that can be read

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

    def add_drafter(self, network: nn.Module) -> None:
        """No kernels run here."""


class Both:
    """One drafter folder, read by them and by us, in float32.

    model: of the target, tables of its own without one; family: ours of it.
    """

    def __init__(self, folder: Path, model: Any = None, family: str = "") -> None:
        self.config = FILES.read_drafter(folder).config
        tables: Any = Tables(self.config.vocab_size, self.config.hidden_size)
        self.theirs = published.load_draft(str(folder))
        self.theirs.set_dtype(mx.float32)
        self.theirs.bind(model or SimpleNamespace(model=tables, lm_head=tables.lm_head))
        target = tables if model is None else Target(model, 512, family)
        network = FILES.load_network(folder, self.config, mx.float32)
        self.ours = BlockModel(network, self.config, target)

    def logits(self, length: int, anchor: int) -> mx.array:
        """Ours of a block behind `length` random features, which are also theirs."""
        state = behind(self.ours, anchor, self._features(length))
        ours = self.ours.logits(state.context, state.anchor, self.config.block_size)
        block = self._block(length, anchor)
        (theirs,) = self.theirs(*block, self.theirs.make_cache(), logits_start=1)
        assert ours.shape == theirs.shape
        assert float(mx.abs(ours - theirs).max()) < TOLERANCE
        return ours

    def path(self, length: int, anchor: int) -> list[int]:
        """The tokens that we draft behind these features, which are also theirs."""
        state = behind(self.ours, anchor, self._features(length))
        ours = list(SelectedPath(self.ours).draft(state, 100).tree.drafted)
        block = self._block(length, anchor)
        path, _, _ = self.theirs.propose(*block, self.theirs.make_cache(), 0.0, logits_start=1)
        assert ours == path[0].tolist()
        return ours

    def _features(self, length: int) -> np.ndarray:
        width = self.config.hidden_size * len(self.config.aux_layers)
        return np.random.default_rng(length).normal(size=(length, width)).astype(np.float32)

    def _block(self, length: int, anchor: int) -> tuple[mx.array, mx.array]:
        masks = [self.config.mask_token_id] * (self.config.block_size - 1)
        return mx.array([[anchor, *masks]]), mx.array(self._features(length))[None]


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setattr(published, "snapshot_download", lambda name, **_: name)


@pytest.mark.parametrize("name", ["smollm2-135m-dflash", "smollm2-135m-variable-prefix"])
def test_a_shipped_drafter_gives_the_reference_the_same_block_logits(name):
    both = Both(DATA / name)
    for length, anchor in ((1, 5), (33, 4000), (300, 49151)):
        assert float(mx.abs(both.logits(length, anchor)).max()) > 1


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
def test_windows_and_scaled_ropes_give_the_reference_the_same_block_logits(tmp_path, name, length):
    raw = drafter_config(**LAYOUTS[name])
    write_drafter_folder(tmp_path, raw, random_drafter(raw))
    assert float(mx.abs(Both(tmp_path).logits(length, 7)).max()) > 1


@pytest.mark.parametrize(
    ("family", "scale"), [("llama", 1.0), ("gemma3_text", 1.0), ("gemma4_text", 8.0)]
)
def test_a_target_s_own_embedding_scale_is_applied_as_the_reference_does(tmp_path, family, scale):
    """Gemma 3 multiplies by 8 too, in its forward pass, which the reference does not see."""
    write_drafter_folder(tmp_path, drafter_config(), random_drafter(drafter_config()))
    both = Both(tmp_path, make_model(family), family)
    assert both.theirs.embed_scale == scale
    assert float(mx.abs(both.logits(20, 7)).max()) > 0.5


BLOCKS = [(1, 3), (20, 7), (90, 96)]  # features and anchors


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_second_version_gives_the_reference_the_same_logits_and_path(tmp_path, is_causal):
    scales = {"final_logit_softcapping": 9.0, "output_multiplier": 0.7}
    raw = reference_dflash2.tiny_config(dflash_config=scales, is_causal=is_causal)
    both = Both(write_drafter_folder(tmp_path, raw, reference_dflash2.random_tensors(raw)))
    for block in BLOCKS:
        both.logits(*block)
        both.path(*block)


def test_a_drafter_that_was_given_a_selector_has_the_reference_s_logits_and_path(tmp_path):
    raw = drafter_config()
    made = make_trainee(raw)
    config = made.config
    tables: Any = Tables(config.vocab_size, config.hidden_size)
    maps = MappedSelector(tables.embedding(), config.vocab_size, 8, seed=0)
    maps.predecessor = maps.predecessor * 30  # so that it changes paths
    with_selector(DFlashTrainee(made.network, config, raw, tables), maps, 5).save(tmp_path)
    both = Both(tmp_path)
    likeliest = [mx.argmax(both.logits(*block), axis=-1).tolist() for block in BLOCKS]
    assert [both.path(*block) for block in BLOCKS] != likeliest
