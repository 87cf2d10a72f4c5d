"""Gemma 4's assistants draft what transformers drafts with them, and change no answer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.drafters.assistant import model as bound
from dflash_mlx.drafters.assistant import network
from support.assistant_formats import CASES, WINDOW, text_of
from support.assistants import assistant, error, logits_along, make_target, state_of, target_of
from support.decoding import paths_of, tree_of
from support.drafting import difference
from support.toys import random_tree

TOLERANCE = 1e-4  # of the largest logit


@pytest.fixture
def made(tmp_path):
    """made(name, target, raw): the assistant of a case, for its target or another."""
    return lambda name, *more, **settings: assistant(tmp_path, name, *more, **settings)


# Against transformers


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(), (9, 1, 11), (1, 19, 1)], ids=str)
def test_drafts_have_the_logits_of_transformers(made, name, sizes):
    """Within the windows of sliding layers and behind their ends, however the text was read."""
    assert error(made(name), target_of(name), name, *sizes) < TOLERANCE


def rotated_on(self, x, seen, original=network.Attention.__call__):
    return original(self, x, seen._replace(position=seen.position + 1))


def scaled(self, x, seen, original=network.Attention.__call__):
    self.q_norm.weight, kept = self.q_norm.weight / 4, self.q_norm.weight
    out = original(self, x, seen)
    self.q_norm.weight = kept
    return out


def stepping_on(self, tokens, parents, original=bound.AssistantDraft.states):
    out = original(self, tokens, parents)
    self._seen = [each._replace(position=each.position + 1) for each in self._seen]
    return out


def halves_turned(self, x, h, seen, original=network.Network.__call__):
    return original(self, h, x, seen)


def own_state(self, x, h, seen, original=network.Network.__call__):
    final, _ = original(self, x, h, seen)
    return final, h


def factors_left_out(self, x, seen, original=network.Layer.__call__):
    return original(self, x, seen) / self.layer_scalar


def exact_gelu(self, x):
    return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))


def unsorted(self, states, original=network.OrderedHead.scored):
    logits, tokens = original(self, states)
    return logits, mx.argsort(self._ordering.token_ordering)[tokens]


def one_fewer(self, states, original=network.OrderedHead.scored):
    self._chosen -= 1
    found = original(self, states)
    self._chosen += 1
    return found


def first_layers(self, cache, original=bound.AssistantModel.seen):
    kinds = [layer.layer_type for layer in self._target.model.layers]
    self._read, kept = [kinds.index(kinds[i]) for i in self._read], self._read
    found = original(self, cache)
    self._read = kept
    return found


def all_keys(self, cache, original=bound.AssistantModel.seen):
    return [
        each._replace(keys=each.layer.arrays[0][:, :, : cache.length],
                      values=each.layer.arrays[1][:, :, : cache.length])
        for each in original(self, cache)
    ]  # fmt: skip


def one_key_fewer(self, cache, original=bound.AssistantModel.seen):
    return [e._replace(keys=e.keys[:, :, 1:], values=e.values[:, :, 1:]) for e in original(self, cache)]


MISREAD: dict[str, Any] = {
    "positions one too far": (network.Attention, "__call__", rotated_on),
    "products that are scaled": (network.Attention, "__call__", scaled),
    "positions that go on with each step": (bound.AssistantDraft, "states", stepping_on),
    "the state before the embedding": (network.Network, "__call__", halves_turned),
    "the target's state in every step": (network.Network, "__call__", own_state),
    "layers without their factor": (network.Layer, "__call__", factors_left_out),
    "another activation": (network.GatedMLP, "__call__", exact_gelu),
    "states before the last norm": (bound, "_last_norm", lambda target: nn.Identity()),
    "embeddings that are not scaled": (bound.AssistantModel, "scales_embeddings", False),
    "keys of earlier layers": (bound.AssistantModel, "seen", first_layers),
    "keys behind the window": (bound.AssistantModel, "seen", all_keys),
    "a shorter window": (bound.AssistantModel, "seen", one_key_fewer),
    "tokens in their own order": (network.OrderedHead, "scored", unsorted),
    "fewer centroids": (network.OrderedHead, "scored", one_fewer),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", MISREAD)
def test_an_assistant_that_is_misread_is_noticed(made, monkeypatch, what, name):
    monkeypatch.setattr(*MISREAD[what])
    far = error(made(name), target_of(name), name)
    is_ordered = "OrderedHead" in str(MISREAD[what][0])
    assert (far > 2 * TOLERANCE) == (not is_ordered or name == "small")


FIELDS = {
    "theta": {"rope_theta": 10000.0},
    "all of a head turns": {"partial_rotary_factor": 1.0},
    "not by the width of a head": {"rope_type": "default"},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
def test_ropes_are_those_of_each_kind_of_layer(made, name, change):
    raw, _ = CASES[name]
    text = raw["text_config"]
    ropes = {**text["rope_parameters"]}
    ropes["full_attention"] = {**ropes["full_attention"], **change}
    changed = {**raw, "text_config": {**text, "rope_parameters": ropes}}
    assert error(made(name, None, changed), target_of(name), name) > 2 * TOLERANCE
