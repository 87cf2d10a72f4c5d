"""What was said before: places that read alike, the tree that grows from them, the store."""

import time
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.continuations.recall import BEFORE, HERE, Lookup, Spoken, grow, join
from dflash_mlx.drafters.continuations.store import Store, Stores, owner_of
from dflash_mlx.drafters.continuations.suffixes import (
    AHEAD,
    CODE,
    LONGEST,
    NEAREST,
    PER_TOKEN,
    Match,
    SuffixArray,
)
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.engine.state import State
from support.decoding import paths_of
from support.stores import filled, held, stored, text_of
from support.toys import Letters, ToyCache

texts = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=5)
ends = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def matched(text, place, end):
    """How many tokens before a place are those that `end` ends with."""
    length = 0
    while length < min(place, len(end), LONGEST) and text[place - 1 - length] == end[-1 - length]:
        length += 1
    return length


def places(many, end):
    """Length of the match and what follows, of every place that matches at all."""
    return [
        (length, tuple(text[place:]))
        for text in many
        for place in range(1, len(text) + 1)
        if (length := matched(text, place, end))
    ]


def backwards(tokens):
    return np.array(tokens[: -LONGEST - 1 : -1], CODE)


@given(texts, ends)
def test_a_suffix_array_finds_the_places_with_the_longest_matches(many, end):
    array = SuffixArray([text_of(text, 1.0 + i) for i, text in enumerate(many)])
    assert [text.tokens.tolist() for text in array.texts()] == many
    found, known = array.find(backwards(end)), places(many, end)
    assert max((m.length for m in found), default=0) == max((n for n, _ in known), default=0)
    for match in found:
        drafted = tuple(match.ahead)
        behind = [text for length, text in known if length == match.length]
        assert any(text[: len(drafted)] == drafted for text in behind)
        assert len(drafted) <= PER_TOKEN * max(m.length for m in found)
    if len(known) <= NEAREST // 2:  # all of them are near
        assert Counter(m.length for m in found) == Counter(length for length, _ in known)


def test_of_many_places_that_match_alike_the_longest_match_is_found():
    array = SuffixArray([text_of([i, 7, 7, 7, 7, 7, 100 + i], 1.0) for i in range(90)])
    for i in range(90):
        best = max(array.find(backwards([i, 7, 7, 7, 7, 7])))
        assert (best.length, best.ahead) == (6, [100 + i])


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(1, 20))
def test_a_conversation_finds_its_own_places_as_it_grows(text, step):
    spoken = Spoken()
    for end in range(2, len(text) + 1, step):
        said = text[:end]
        known = [(matched(said, place, said), place) for place in range(2, end)]
        latest = [(n, said[p : p + AHEAD]) for n, p in reversed(known) if n >= 2][:16]
        stop = next((i + 1 for i, (n, _) in enumerate(latest) if n == LONGEST), len(latest))
        found = [(match.length, list(match.ahead)) for match in spoken.find(said)]
        assert found == latest[:stop]


def test_a_conversation_that_was_taken_back_is_looked_up_anew():
    spoken = Spoken()
    spoken.find([1, 2, 3, 1, 2, 9, 9, 9])
    assert [m.ahead for m in spoken.find([1, 2, 3, 1, 2])] == [[3, 1, 2]]


def test_a_long_match_overrules_short_ones_and_short_ones_add_up():
    long, short = Match(8, [5], 0.0), [Match(2, [6], 0.0)] * 4
    assert grow([long, *short], 8).drafted[0] == 5
    one, four = grow(short[:1], 8).logprobs[1], grow(short, 8).logprobs[1]
    assert one < four < 0


@given(st.lists(st.tuples(st.integers(1, 16), ends), min_size=1, max_size=12), st.integers(1, 12))
def test_a_tree_is_the_likeliest_part_of_what_followed(found, most):
    matches = [Match(length, ahead, 0.0) for length, ahead in found]
    tree, whole = grow(matches, most), grow(matches, 500)
    assert len(tree) <= most + 1
    assert tree.drafted == whole.drafted[:most] and tree.parents == whole.parents[: most + 1]
    paths_of(whole)  # no equal siblings
    children = Counter()
    for parent, logprob in zip(whole.parents[1:], whole.logprobs[1:], strict=True):
        children[parent] += np.exp(logprob)
    assert max(children.values()) < 1
    assert grow(matches, most, width=1).is_chain


def test_a_node_says_whether_this_conversation_said_it_and_else_when():
    tree = grow([Match(4, [5, 6], 0.0), Match(4, [5, 7], 123.0), Match(4, [8], 99.0)], 8)
    told = dict(zip(tree.drafted, zip(tree.sources[1:], tree.said[1:], strict=True), strict=True))
    assert told == {5: (HERE, 0), 6: (HERE, 0), 7: (BEFORE, 123.0), 8: (BEFORE, 99.0)}
    assert tree.prune([0, 1]).said == tree.said[:2]


def test_a_token_that_both_propose_is_one_node_with_a_better_chance():
    p, q = np.log([0.6, 0.5]), np.log([0.3, 0.4, 0.9])
    recalled = Tree((5, 7), (-1, 0, 1), (0.0, *p), ("", BEFORE, BEFORE), (0.0, 9.0, 9.0))
    draft = Tree((5, 6, 7), (-1, 0, 0, 2), (0.0, *q), ("", *["first"] * 3))
    both = join(draft, recalled)
    assert both.drafted == (5, 6, 7, 7) and both.parents == (-1, 0, 0, 2, 1)
    agreed, contested, alone, unknown = both.logprobs[1:]
    assert agreed > max(p[0], q[0]) and contested < q[1]
    assert alone == q[2] and unknown < p[1], "of what only one of them continues"
    assert both.sources == ("", BEFORE, "first", "first", BEFORE)
    assert both.said == (0.0, 9.0, 0.0, 0.0, 9.0)
    assert join(draft, Tree.chain()) is draft and join(Tree.chain(), recalled) is recalled


def drafted(store, tokens, most=8):
    """What a conversation that says `tokens` drafts from a store."""
    state = State(ToyCache(), NoContext())
    state.earlier, state._tokens = store, tokens
    return Lookup().draft(state, most)


def test_what_others_said_is_drafted_and_named():
    tree = drafted(filled([*range(20)]), [30, 4, 5, 6, 7])
    assert tree.drafted[:3] == (8, 9, 10)
    assert set(tree.sources[1:]) == {BEFORE} and set(tree.said[1:]) == {1.0}
    assert len(drafted(Store(), [30, 5, 6, 7])) == 1


def test_a_turn_is_stored_without_the_turns_before_it():
    rng = np.random.default_rng(0)
    said = rng.integers(1000, size=500).tolist()
    store = filled(said[:200], said[:400], said[:400], said)
    assert held(store) < 500 + 3 * 2 * LONGEST
    for end in range(20, 490, 7):
        assert drafted(store, said[:end]).drafted[:1] == (said[end],)


def test_the_oldest_texts_go_first_and_a_text_beyond_the_limit_is_told():
    many = [[100 * i + k for k in range(100)] for i in range(30)]
    store = filled(*many, limit=8 * 1000)
    assert held(store) <= 1000 and not store.problem
    assert stored(store)[-1] == many[-1] and many[0] not in stored(store)
    for size in (1001, 900):  # the second would be all that a store keeps when it makes room
        store.problem = ""
        store.add(range(size))
        store.wait()
        assert "was not kept" in store.problem
        assert stored(store)[-1] == many[-1], "what is there stays"


def test_a_text_of_nothing_is_none():
    store = Store()
    store.add([])
    assert not store._pending and store._thread is None


def test_what_is_forgotten_is_not_found_even_if_it_was_being_sorted():
    store = Store()
    store.add(np.random.default_rng(0).integers(9, size=400_000).tolist())
    while store._pending:
        pass  # until it is being sorted
    store.forget()
    assert store.wait(60) and held(store) == 0
    store.add([1, 2, 3])
    assert store.wait(60) and held(store) == 3


def test_most_texts_go_from_memory_where_it_is_short_and_the_file_keeps_them(tmp_path):
    stores, long = Stores(tmp_path), np.random.default_rng(0).integers(9, size=2**17).tolist()
    store = stores.of("model", Vocabulary(9))
    for text in (long, [20, 21, 22, 23]):
        store.add(text)
        assert store.wait(60)
    stores.spare()
    assert held(store) == 4 and len(drafted(store, [20, 21])) > 1
    again = Stores(tmp_path).of("model", Vocabulary(9))
    assert again.wait(60) and held(again) == len(long) + 4


def test_adding_does_not_wait_for_the_sorting():
    store, text = Store(), np.random.default_rng(0).integers(999, size=300_000).tolist()
    begin = time.perf_counter()
    store.add(text)
    added = time.perf_counter() - begin
    assert store.wait(60)
    assert added < 0.5 * (time.perf_counter() - begin)


class Vocabulary(Letters):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def convert_ids_to_tokens(self, ids):
        return [str(i) for i in ids]


def test_users_models_and_tokenizers_have_stores_of_their_own(tmp_path):
    stores = Stores(tmp_path / "said")
    a, b = stores.of("model", Vocabulary(9), "key a"), stores.of("model", Vocabulary(9), "key b")
    a.add([1, 2, 3, 4])
    assert a.wait(60) and len(drafted(a, [2, 3])) > 1
    others = (
        b,
        stores.of("other", Vocabulary(9), "key a"),
        stores.of("model", Vocabulary(8), "key a"),
    )
    assert all(len(drafted(other, [2, 3])) == 1 for other in (b, *others))
    assert stores.of("model", Vocabulary(9), "key a") is a
    assert owner_of("m", Vocabulary(9)) != owner_of("m", Vocabulary(10))
    again = Stores(tmp_path / "said").of("model", Vocabulary(9), "key a")
    assert again.wait(60) and stored(again) == [[1, 2, 3, 4]]
    stores.forget()
    assert not held(a) and not any((tmp_path / "said").iterdir())
