"""An agent's turns are read once, also after a restart; what is too long is refused before that."""

from __future__ import annotations

import re

import long_prompts
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.serve import chat
from dflash_mlx.serve.openai_requests import FIELDS
from dflash_mlx.session import memory, session
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.session.templates import ends_of_turns
from support.decoding import start
from support.families import VOCAB_SIZE
from support.hybrids import plain_answer, target_of
from support.serving import actor_pair, speak
from support.toys import Letters, prompt_of

pytestmark = pytest.mark.usefixtures("interpreted")


def words(text: str) -> list[int]:
    """A token for each word and each mark."""
    return [sum(map(ord, part)) % VOCAB_SIZE for part in re.findall(r"\w+|\W", text)]


def replayed(name: str, folder=None, **settings) -> long_prompts.Replay:
    """Seven turns behind a system prompt of 150 words, with room in memory for one of them."""
    target = target_of(name)
    least = start(target, NoDraft(), prompt_of(0, 900)).nbytes / 1e9
    replay = long_prompts.Replay(Pair(target, Letters()), words, folder, least, **settings)
    replay.all_turns(7, 300, 4 if folder else 0, 48)
    return replay


@pytest.mark.parametrize(
    ("name", "restarts"), [("llama", True), ("falcon_h1", False), ("falcon_h1", True)]
)
def test_of_an_agents_turns_under_three_percent_are_read_again(name, restarts, tmp_path):
    rows = replayed(name, tmp_path if restarts else None).rows
    assert rows[4].tokens > 600 and all(row.known for row in rows[1:])
    assert long_prompts.share_again(rows[:7]) < 0.03


def test_without_the_ends_of_turns_a_recurrent_target_reads_more_of_them_again():
    replays = (replayed("falcon_h1", marks_ends=marks) for marks in (True, False))
    again = [[row.again for row in replay.rows[5:8]] for replay in replays]
    assert sum(again[0]) < 10 < 100 < sum(again[1]), again


def test_ends_of_turns_are_the_system_prompts_and_that_of_the_users_last_words():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "first"}]
    said = {"role": "assistant", "content": "a", "thought": "because"}
    later = [*asked, said, {"role": "user", "content": "second"}, said]
    tool = {"role": "tool", "content": "result"}

    def ends(messages):
        text = long_prompts.render(messages, begin=True)
        found = ends_of_turns([*text], messages, lambda some: [*long_prompts.render(some)])
        return [text[:end] for end in found]

    for messages in (asked, [*asked, said, tool]):
        system, user = ends(messages)
        assert system.endswith("s<|im_end|>\n<|im_start|>user\n")
        assert user.endswith("first<|im_end|>\n")
    assert ends([*later, tool])[1].endswith("second<|im_end|>\n")
    assert ends(asked[:1]) == []


@pytest.mark.parametrize("is_recurrent", [True, False])
def test_the_server_marks_ends_of_turns_for_recurrent_targets(is_recurrent):
    pair = actor_pair(speak)
    pair.target.is_recurrent = is_recurrent
    words = {"system": "rules", "user": "first", "assistant": "a", "tool": "result"}
    messages = [{"role": role, "content": text} for role, text in words.items()]
    prompt = chat.prompt_of(pair, chat.Chat(FIELDS, messages))
    text = [pair.tokenizer.decode(prompt.tokens[:end]) for end in prompt.ends]
    assert text == ["[system]rules[user]", "[system]rules[user]first"] * is_recurrent


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_answers_behind_a_prompt_that_was_read_up_to_ends_of_turns_are_the_same(name):
    target, prompt = target_of(name), prompt_of(3, 900)
    config, scheduler = DecodeConfig("none", max_tokens=8), Scheduler(Pair(target, Letters()))
    scheduler.prefixes = PrefixCache(10**9)
    for tail, reused in (([], 0), (prompt_of(4, 30), 300), (prompt_of(5, 9), 300)):
        given = [*prompt[: 300 if tail else 900], *tail]
        sequence = scheduler.submit(Prompt(tuple(given), ends=(300, 700)), config)
        tokens = []
        while len(scheduler):
            tokens += [token for _, delta in scheduler.step() for token in delta.tokens]
        assert tokens == plain_answer(target, given, 8)
        assert sequence.statistics.reused_tokens == reused


def test_a_long_prompt_that_does_not_fit_is_refused_before_it_is_read(monkeypatch):
    pair, config = Pair(target_of("llama"), Letters()), DecodeConfig("none", max_tokens=8)
    need = start(pair.target, NoDraft(), prompt_of(1, 300)).nbytes
    monkeypatch.setattr(session, "LONG", 200)
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * need)
    assert list(Session(pair, config).stream(prompt_of(2, 300)))
    with pytest.raises(DFlashError, match="708 tokens.*into which 511 tokens fit"):
        Session(pair, config).stream(prompt_of(2, 700))


def test_prefixes_go_before_a_long_prompt_is_read(monkeypatch):
    pair, config = Pair(target_of("llama"), Letters()), DecodeConfig("none", max_tokens=8)
    prefixes = PrefixCache(10**9)
    list(Session(pair, config, prefixes).stream(prompt_of(1, 300)))
    kept = prefixes.nbytes
    monkeypatch.setattr(session, "LONG", 200)
    monkeypatch.setattr(memory, "free_memory", lambda: kept)
    deltas = Session(pair, config, prefixes).stream(prompt_of(2, 300))
    next(deltas)
    assert kept and prefixes.nbytes == 0
    deltas.close()


def test_what_waits_is_refused_when_the_memory_for_it_is_gone():
    target = target_of("llama")
    scheduler = Scheduler(Pair(target, Letters()), 10**9)
    waits = scheduler.submit(prompt_of(1, 600), DecodeConfig("none", max_tokens=8))
    fits = scheduler.submit(prompt_of(2, 20), DecodeConfig("none", max_tokens=8))
    scheduler.memory.limit = scheduler.memory.bytes_of(target, fits.drafter, 100)
    said = scheduler.step()
    failed = {each: told for each, told in said if isinstance(told, Exception)}
    assert [*failed] == [waits] and "608 tokens" in str(failed[waits])
    while len(scheduler):
        said += scheduler.step()
    assert any(each is fits and told.finish_reason == "length" for each, told in said[1:])
