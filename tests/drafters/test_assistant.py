"""Gemma 4's assistants draft what transformers drafts with them, and change no answer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.drafters.assistant import model as bound
from dflash_mlx.drafters.assistant import network
from dflash_mlx.drafters.networks import layers
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.sequence import SequenceCache
from support.assistant_formats import CASES, text_of
from support.assistants import (
    assistant,
    error,
    logits_along,
    state_of,
    target_of,
    tensors,
)
from support.drafter_formats import written
from support.drafting import difference, drafted_tree

TOLERANCE = 1e-4  # of the largest logit


@pytest.fixture
def made(tmp_path):
    """made(name, target, settings): the assistant of a case, for its target or another."""
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


def factors_left_out(self, x, seen, original=layers.GemmaLayer.__call__):
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
    kinds = [layer.layer_type for layer in self.target.model.layers]
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
    return [
        each._replace(keys=each.keys[:, :, 1:], values=each.values[:, :, 1:])
        for each in original(self, cache)
    ]


MISREAD: dict[str, Any] = {
    "positions one too far": (network.Attention, "__call__", rotated_on),
    "products that are scaled": (network.Attention, "__call__", scaled),
    "positions that go on with each step": (bound.AssistantDraft, "states", stepping_on),
    "the state before the embedding": (network.Network, "__call__", halves_turned),
    "the target's state in every step": (network.Network, "__call__", own_state),
    "layers without their factor": (layers.GemmaLayer, "__call__", factors_left_out),
    "another activation": (layers.GemmaMLP, "__call__", exact_gelu),
    "states before the last norm": (bound, "last_norm", lambda target: nn.Identity()),
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
    assert (far > TOLERANCE) == (not is_ordered or name == "small")


FIELDS = {
    "theta": {"rope_theta": 10000.0},
    "all of a head turns": {"partial_rotary_factor": 1.0},
    "not by the width of a head": {"rope_type": "default"},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
def test_ropes_are_those_of_each_kind_of_layer(tmp_path, name, change):
    raw, _ = CASES[name]
    text = raw["text_config"]
    ropes = {**text["rope_parameters"]}
    ropes["full_attention"] = {**ropes["full_attention"], **change}
    changed = {**raw, "text_config": {**text, "rope_parameters": ropes}}
    model = written(tmp_path, changed, tensors(name), target_of(name))
    assert error(model, target_of(name), name) > 2 * TOLERANCE


# Trees, caches and the context


@pytest.mark.parametrize("name", CASES)
def test_every_node_of_a_tree_has_the_logits_of_its_path(made, name):
    """Rows are at one position and do not see each other, so a tree needs no mask."""
    model, target, tokens = made(name), target_of(name), text_of(21)
    draft = model.begin(state_of(model, target, tokens))
    for path, found in drafted_tree(draft, tokens[-1]):
        alone = logits_along(model, state_of(model, target, tokens), path)[-1]
        assert difference(found, alone) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_a_ranking_and_the_likeliest_one_are_those_of_the_logits(made, name):
    model, target, tokens = made(name), target_of(name), text_of(21)
    state = state_of(model, target, tokens)
    rows, parents = mx.array([tokens[-1], 5, 9]), [-1, -1, -1]
    logits = np.array(model.begin(state).logits(rows, parents))
    assert model.begin(state).likeliest(rows, parents).tolist() == logits.argmax(-1).tolist()
    ranked = model.begin(state).ranked(rows, parents, 5)
    assert ranked.tokens.tolist() == np.argsort(-logits, axis=-1)[:, :5].tolist()
    total = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = np.take_along_axis(logits, ranked.tokens, axis=-1) - total
    np.testing.assert_allclose(ranked.logprobs, found, atol=TOLERANCE)


def test_a_draft_window_is_a_window_of_full_layers_too(made):
    whole, short, target = made("dense"), made("dense", draft_window=5), target_of("dense")
    tokens = text_of(21)
    far = [logits_along(m, state_of(m, target, tokens), [tokens[-1]]) for m in (whole, short)]
    assert difference(*far) > 0.01
    seen = short.seen(state_of(short, target, tokens).cache)
    assert {each.keys.shape[2] for each in seen} == {4}


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("window", [None, 6])
def test_between_passes_a_cache_gives_what_the_next_pass_sees_of_earlier_tokens(window, bits):
    """Unpacked, and as far back as the window reaches, wherever the text was cut."""
    layer, rng = LayerCache(window, kv_bits=bits), np.random.default_rng(0)
    cache = SequenceCache([layer])

    def rows(count: int) -> tuple[mx.array, mx.array]:
        cache.begin(Block(count))
        new = [mx.array(rng.normal(size=(1, 2, count, 32)).astype(np.float32)) for _ in range(2)]
        return layer.update_and_fetch(*new)

    for step, kept in enumerate((1, 3, 300, 2, 9)):
        rows(kept + 2)  # the last two are discarded
        cache.commit(range(kept))
        if step == 3:
            cache.rewind(cache.length - 4)
        found = layer.committed()
        seen = rows(1)
        cache.discard()
        length = cache.length if window is None else min(cache.length, window - 1)
        for mine, theirs in zip(found, seen, strict=True):
            assert mine.shape == (1, 2, length, 32) and mx.array_equal(mine, theirs[:, :, :-1])


def test_of_a_text_the_last_state_is_kept_and_nothing_else(made):
    model = made("dense")
    context, features = model.new_context(), mx.random.normal((9, 64), key=mx.random.key(1))
    assert context.refill_from(0) == 0
    for part in (features[:4], features[4:8], features[8:]):
        context.append(mx.zeros(len(part), mx.int32), part)
    assert context.length == 9 and [array.shape for array in context.arrays] == [(1, 64)]
    assert context.refill_from(9) == 9 and context.refill_from(5) == 4
    other, kept = context.fork(), model.new_context()
    kept.restore(context.saved(), mx.zeros(9, mx.int32))
    other.trim(4)
    assert other.length == 4 and other.refill_from(4) == 3 and context.refill_from(9) == 9
    with pytest.raises(ValueError, match="not known"):
        _ = other.last
    other.append(mx.zeros(1, mx.int32), features[8:])
    for each in (other, kept):
        assert mx.array_equal(each.last, context.last)
    with pytest.raises(ValueError, match="no features"):
        context.append(mx.array([1]), None)


@pytest.mark.parametrize(("name", "is_known"), [("dense", False), ("small", True)])
def test_only_tokens_that_a_head_leaves_out_may_be_without_a_logit(
    made, monkeypatch, name, is_known
):
    """Where all are scored one that is -inf has overflown."""
    model = made(name)
    monkeypatch.setattr(model, "tried", lambda context: mx.array([[1.0, -mx.inf]]))
    assert mx.isfinite(model.try_out(model.new_context())).all().item() == is_known
