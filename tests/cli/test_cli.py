"""The command lines: what they print, and how they refuse."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_chat import main as chat
from dflash_mlx.cli import generate

KEYS = """
    text tokens prompt_tokens generated_tokens finish_reason method prefill_seconds
    time_to_first_token decode_seconds tokens_per_second rounds mean_accepted acceptance_rate
    accepted_by_position peak_memory_bytes
"""


# What is printed


@pytest.mark.parametrize("method", ["none", "dflash"])
def test_the_text_that_streams_is_the_text_in_the_json_object(ask, method):
    fixed = ["--block-size", "8"] if method == "dflash" else []
    streamed = ask("--prompt", "hello", "--method", method, *fixed)
    result = ask("--prompt", "hello", "--method", method, *fixed, "--json")
    answer = result.answer
    assert streamed.code == 0 and streamed.out == answer["text"] + "\n"
    assert len(answer["text"]) > 10
    assert streamed.err.count("\n") == 1 and "tok/s" in streamed.err
    assert result.out.count("\n") == 1 and result.err == ""
    assert answer.keys() >= {*KEYS.split()}
    assert (answer["finish_reason"], answer["method"]) == ("length", method)
    assert answer["generated_tokens"] == len(answer["tokens"]) == 24
    assert answer["prompt_tokens"] == len("<user\nhello><assistant\n")
    assert answer["mean_accepted"] == 23 / answer["rounds"]
    assert answer["tokens_per_second"] == pytest.approx(23 / answer["decode_seconds"])
    assert 0 < answer["prefill_seconds"] < answer["time_to_first_token"]
    assert len(answer["accepted_by_position"]) == (7 if method == "dflash" else 0)
    assert answer["peak_memory_bytes"] > 1e5
    assert answer["tokens"] == ask("--prompt", "hello", "--json").answer["tokens"]


def test_a_prompt_may_come_from_standard_input_and_a_conversation_from_a_file(ask, tmp_path):
    expected = ask("--prompt", "hello", "--json").answer
    assert ask("--prompt", "-", "--json", stdin=b"hello").answer["text"] == expected["text"]
    lengths = {}
    for text, raw in (
        (b"hello\n", ()),
        (b"hello\n\n", ()),
        (b"hello", ["--raw"]),
        (b"hello\n", ["--raw"]),
    ):
        answer = ask("--prompt", "-", "--json", *raw, stdin=text).answer
        lengths[text, bool(raw)] = answer["prompt_tokens"]
    assert lengths[b"hello\n", False] == expected["prompt_tokens"], "echo adds the last line break"
    assert lengths[b"hello\n\n", False] == expected["prompt_tokens"] + 1
    assert lengths[b"hello\n", True] == lengths[b"hello", True] + 1, "raw is as it is"
    file = tmp_path / "messages.json"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "bcd"}]
    file.write_text(json.dumps(turns[:1]))
    assert ask("--messages", str(file), "--json").answer["tokens"] == expected["tokens"]
    file.write_text(json.dumps(turns))
    answer = ask("--messages", str(file), "--json").answer
    assert answer["prompt_tokens"] == len("<user\nhello><assistant\nbcd><assistant\n")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    file.write_text(json.dumps([{"role": "user", "content": parts}]), encoding="utf-8-sig")
    assert ask("--messages", str(file), "--json").answer["tokens"] == expected["tokens"]
    file.write_text(json.dumps([{"role": "system", "content": "be"}, *turns[:1]]))
    answer = ask("--prompt", "hello", "--system", "be", "--json").answer
    assert answer["tokens"] == ask("--messages", str(file), "--json").answer["tokens"]
    assert answer["tokens"] != expected["tokens"]


def test_raw_leaves_the_template_out(ask, folders):
    options = ["--prompt", "hello", "--raw", "--json"]
    answers = [ask(*options, *more).answer for more in ([], ["--model", folders["bare"]])]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert answers[0]["prompt_tokens"] == len("hello")


def test_the_answer_ends_before_the_first_of_several_stop_texts(ask):
    text = ask("--prompt", "hello", "--json").answer["text"]
    late, early = text[14:16], text[7:9]
    end = min(text.index(late), text.index(early))
    options = ["--prompt", "hello", "--stop", late, "--stop", early]
    answer = ask(*options, "--json").answer
    assert answer["text"] == text[:end]
    assert answer["finish_reason"] == "stop"
    assert ask(*options).out == text[:end] + "\n"


SCHEMA = '\ufeff{"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], '
SCHEMA += '"additionalProperties": false}'


def test_an_answer_follows_a_schema_a_regular_expression_and_a_grammar(ask, tmp_path):
    (schema := tmp_path / "schema").write_text(SCHEMA, encoding="utf-8")
    for method in ("none", "ddtree"):
        told = ask(*PROMPT, "--json-schema", str(schema), "--method", method, "--json").answer
        assert json.loads(told["text"])["n"] in (1, 22) and told["finish_reason"] == "stop"
    assert ask(*PROMPT, "--regex", "(one|two)!").out.strip() in ("one!", "two!")
    (grammar := tmp_path / "grammar").write_text('start: "x" | "yy"')
    assert ask(*PROMPT, "--grammar", str(grammar)).out.strip() in ("x", "yy")
    code, out, _ = ask(*PROMPT, "--json-object", "--max-tokens", "5")
    assert (code, out[0]) == (0, "{")


# What is refused


class Contents(str):
    """The option gets the name of a file with this text."""


PROMPT = ["--prompt", "hello"]
UNSEEN = [*PROMPT, "--model", "none/x"]  # what is refused before this model is looked for
STRUCTURES = {"array": '{"type": "array", "uniqueItems": true}', "strin": '{"type": "strin"}'}
REFUSED: list[tuple[Any, ...]] = [  # the options, and what the sentence says
    ([*PROMPT, "--sped", "1"], "--sped"),
    ([], "--prompt"),
    ([*PROMPT, "--messages", "x.json"], "--messages"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "-"], "the prompt is empty"),
    (["--prompt", "hel\udcfflo"], "UTF-8"),
    ([*PROMPT, "--system", "hel\udcfflo"], "UTF-8"),
    ([*PROMPT, "--raw", "--system", "be brief"], "--raw works on plain"),
    (["--messages", "nowhere.json"], "nowhere.json cannot be read"),
    (["--prompt", "x" * 300], "the prompt has 318 tokens"),
    ([*PROMPT, "--model", "./nowhere/at/all"], "no folder './nowhere/at/all'"),
    ([*PROMPT, "--model", "owner/name"], "was not found here"),
    ([*PROMPT, "--model", "owner/name-GGUF"], "was not found here"),
    ([*PROMPT, "--model", "typo.gguf"], "no file 'typo.gguf'; check its path"),
    ([*PROMPT, "--drafter", "/nowhere/x"], "no folder '/nowhere/x'"),
    ([*PROMPT, "--drafter", "owner/name"], "was not found here"),
    # conversations
    (["--messages", Contents("hello")], "is not JSON"),
    (["--messages", Contents("[]")], "holds no messages"),
    (["--messages", Contents('[{"role": "user", "content": 3}]')], "message 1"),
    (
        ["--messages", Contents('[{"role": "user", "content": [{"type": "image_url"}]}]')],
        "message 1",
    ),
    (["--messages", Contents("[" * 100_000)], "nested too deeply"),
    (
        ["--raw", "--messages", Contents('[{"role": "user", "content": "but raw"}]')],
        "--raw works on plain text alone",
    ),
    # pairs that do not serve
    ([*PROMPT, "--drafter", "wide"], "hidden_size 128, but"),
    ([*PROMPT, "--drafter", "model"], "model is the target itself"),
    ([*PROMPT, "--model", "bare"], "this model has no chat template; add --raw"),
    ([*PROMPT, "--model", "strict", "--system", "be brief"], "System role not supported"),
    # options that would change nothing
    ([*PROMPT, "--method", "dflash", "--budget", "8"], "--budget is 8", "ddtree"),
    ([*PROMPT, "--method", "ddtree", "--steps", "2"], "--steps is 2", "specdiff"),
    ([*PROMPT, "--method", "ddtree", "--branches", "3"], "--branches is 3", "d2sd"),
    ([*PROMPT, "--method", "ngram"], "--drafter is ", "dflash"),
    (
        [*PROMPT, "--method", "ngram", "--drafter", "none", "--drafter-bits", "8"],
        "--drafter-bits is 8",
    ),
    ([*PROMPT, "--method", "dflash", "--second-drafter", "x"], "--second-drafter is x", "d2sd"),
    ([*PROMPT, "--top-k", "5"], "--top-k is 5", "--temperature"),
    ([*PROMPT, "--top-p", "0.9"], "--top-p is 0.9", "--temperature"),
    ([*PROMPT, "--acceptance", "reject"], "--acceptance is reject", "--temperature"),
    ([*PROMPT, "--exact", "--temperature", "1"], "--exact is for greedy", "temperature 0"),
    # what an answer has to be
    ([*UNSEEN, "--json-schema", "nowhere.json"], "nowhere.json cannot be read"),
    ([*UNSEEN, "--json-schema", Contents("{")], "--json-schema", "is not JSON", "column 2"),
    ([*UNSEEN, "--json-schema", Contents(STRUCTURES["strin"])], "--json-schema", "strin"),
    ([*UNSEEN, "--json-schema", Contents("[1]")], "--json-schema", "choose a JSON object"),
    ([*UNSEEN, "--json-schema", Contents(STRUCTURES["array"])], "--json-schema", "uniqueItems"),
    ([*UNSEEN, "--regex", "a(b"], "--regex", "unclosed group"),
    ([*UNSEEN, "--regex", ""], "--regex is ''"),
    ([*UNSEEN, "--grammar", Contents("start: foo")], "--grammar", "line 1, column 8", "foo"),
    ([*UNSEEN, "--regex", "a", "--json-object"], "--json-object", "regex", "leave one"),
]
WRONG = {
    "--block-size": ("9", "two"),
    "--temperature": ("-1", "nan"),
    "--top-p": ("0",),
    "--top-k": ("-1",),
    "--min-p": ("2",),
    "--repetition-penalty": ("0",),
    "--repetition-context": ("-1",),
    "--presence-penalty": ("2.1", "nan"),
    "--frequency-penalty": ("-3",),
    "--max-tokens": ("0", "99999999999"),
    "--draft-window": ("1",),
    "--prefill-step": ("0",),
    "--stop": ("",),
    "--seed": ("4294967296",),
    "--method": ("magic",),
    "--template": ("a=" + "[" * 100_000,),
}
REFUSED += [
    ([*PROMPT, f"{option}={value}"], option, value[:9] or "''")
    for option, values in WRONG.items()
    for value in values
]


def assert_refused(result, *fragments: str) -> None:
    assert (result.code, result.out) == (2, "")
    assert [words for words in fragments if words not in result.err] == []
    assert result.err.count("\n") == 1 and result.err.endswith("\n")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: "-".join(case[1:]))
def test_bad_input_is_one_sentence_and_nothing_on_stdout(ask, case, folders, tmp_path, monkeypatch):
    argv, *fragments = case
    monkeypatch.chdir(tmp_path)
    for contents in argv:
        if isinstance(contents, Contents):
            Path("given").write_text(contents, encoding="utf-8")
    named = ["given" if isinstance(word, Contents) else folders.get(word, word) for word in argv]
    assert_refused(ask(*named), *fragments)


def test_standard_input_that_is_not_utf8_is_one_sentence_with_the_byte(ask):
    assert_refused(ask("--prompt", "-", stdin=b"hello \xff"), "0xff at 6")


def test_without_llguidance_one_sentence_says_what_to_install(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert_refused(ask(*UNSEEN, "--regex", "a"), "--regex needs llguidance", "pip install")


def test_a_drafter_by_the_name_of_none_is_no_drafter(command, folders):
    options = [*PROMPT, "--model", folders["model"], "--drafter", "none", "--max-tokens", "8"]
    assert command(generate.main, *options, "--method", "none", "--json").code == 0
    assert command(generate.main, *options, "--json").answer["method"] == "ngram"


@pytest.mark.parametrize("main", [generate.main, chat.run], ids=["generate", "chat"])
def test_a_model_without_a_known_drafter_looks_up_n_grams(command, folders, main):
    options = [*PROMPT, "--model", folders["model"], "--max-tokens", "24"]
    result = command(main, *options)
    said, figures = result.err.splitlines()
    assert result.code == 0 and "tok/s" in figures
    assert said.startswith(f"no drafter is known for {folders['model']}, so ")
    assert "prompt lookup" in said and "--drafter" in said
    assert_refused(command(main, *options, "--method", "ddtree"), "no drafter is known for")
    chosen = command(main, *options, "--method", "ngram")
    assert (chosen.out, len(chosen.err.splitlines())) == (result.out, 1)


# What is no bad input


def interrupted_import(argv: Sequence[str]) -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        raise ImportError("no such module")  # noqa: B904 - as libraries do


def test_an_interrupt_that_a_library_tells_in_other_words_is_one(command):
    assert command(interrupted_import) == (130, "", "\n")


def test_a_fault_of_ours_is_one_sentence_that_names_its_log(command, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = command(lambda argv: 1 // 0)
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert (result.code, result.out) == (1, "") and str(log) in result.err
    assert "Traceback" not in result.err and "ZeroDivisionError" in log.read_text()


# The chat without a terminal


def test_one_prompt_on_the_command_line_is_answered_and_nothing_asked(command, ask, folders):
    pair = ["--model", folders["model"], "--drafter", folders["drafter"]]
    expected = ask("--prompt", "hello").out
    for argv, stdin in (
        (["--prompt", "hello"], b""),
        (["--prompt", "-"], b"hello"),
        ([], b"hello\n"),
    ):
        options = [*pair, "--method", "dflash", "--max-tokens", "24", *argv]
        assert command(chat.run, *options, stdin=stdin).out == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sped", "1"], "--sped"),
        ([*PROMPT, "--block-size", "9"], "--block-size is 9"),
        ([*PROMPT, "--resume"], "--resume is for the chat on a terminal"),
        ([*PROMPT, "--prefix-gb", "1"], "--prefix-gb is for the chat on a terminal"),
        (["--prefix-disk-gb", "-1"], "--prefix-disk-gb is -1.0"),
        ([*PROMPT, "--conversations", "."], "--conversations is for the chat on a terminal"),
        ([], "the prompt is empty"),
    ],
)
def test_the_chat_refuses_bad_input_with_one_sentence(command, folders, options, message):
    pair = ["--model", folders["model"], "--drafter", folders["drafter"]]
    assert_refused(command(chat.run, *pair, *options), message)
