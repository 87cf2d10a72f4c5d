"""The command lines: what they print, and how they refuse."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Sequence

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


# What is refused


PROMPT = ["--prompt", "hello"]
REFUSED = {
    "an unknown option": ([*PROMPT, "--sped", "1"], "--sped"),
    "no prompt": ([], "--prompt"),
    "two prompts": ([*PROMPT, "--messages", "x.json"], "--messages"),
    "an empty prompt": (["--prompt", ""], "the prompt is empty"),
    "an empty standard input": (["--prompt", "-"], "the prompt is empty"),
    "a prompt that is no text": (["--prompt", "hel\udcfflo"], "UTF-8"),
    "a raw system prompt": ([*PROMPT, "--raw", "--system", "be brief"], "--raw works on plain"),
    "messages that are missing": (["--messages", "nowhere.json"], "nowhere.json cannot be read"),
    "a prompt too long": (["--prompt", "x" * 300], "the prompt has 318 tokens"),
    "an unknown model": ([*PROMPT, "--model", "./nowhere/at/all"], "no folder './nowhere/at/all'"),
    "a model that cannot be had": ([*PROMPT, "--model", "owner/name"], "could not be downloaded"),
    "an unknown drafter": ([*PROMPT, "--drafter", "/nowhere/x"], "no folder '/nowhere/x'"),
    "a drafter that cannot be had": ([*PROMPT, "--drafter", "owner/name"], "could not be downl"),
}
MESSAGES = {
    "hello": "is no JSON text",
    "[]": "holds no messages",
    '[{"role": "user", "content": 3}]': "message 1",
    '[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]': "message 1",
    "[" * 100_000: "nested too deeply",
    '[{"role": "user", "content": "but raw"}]': "--raw works on plain text alone",
}
WRONG = {
    "--block-size": ("9", "two"),
    "--temperature": ("-1", "nan"),
    "--top-p": ("0",),
    "--top-k": ("-1",),
    "--min-p": ("2",),
    "--repetition-penalty": ("0",),
    "--repetition-context": ("0",),
    "--max-tokens": ("0", "99999999999"),
    "--draft-window": ("1",),
    "--prefill-step": ("0",),
    "--stop": ("",),
    "--seed": ("4294967296",),
    "--method": ("magic",),
    "--template": ("a=" + "[" * 100_000,),
}


def assert_refused(result, message: str) -> None:
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1 and result.err.endswith("\n")
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_sentence_and_nothing_on_stdout(ask, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(ask(*argv), message)


def test_standard_input_that_is_not_utf8_is_one_sentence_with_the_byte(ask):
    assert_refused(ask("--prompt", "-", stdin=b"hello \xff"), "0xff at position 6")


@pytest.mark.parametrize("contents", MESSAGES)
def test_a_conversation_that_is_none_is_refused(ask, contents, tmp_path):
    (tmp_path / "messages.json").write_text(contents)
    raw = ["--raw"] if "but raw" in contents else []
    assert_refused(ask("--messages", str(tmp_path / "messages.json"), *raw), MESSAGES[contents])


@pytest.mark.parametrize(
    ("option", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_setting_of_no_sense_is_named_with_its_value(ask, option, value):
    result = ask(*PROMPT, f"{option}={value}")
    assert_refused(result, value[:9] or "''")
    assert option in result.err


@pytest.mark.parametrize(
    ("options", "refused", "offered"),
    [
        (["--method", "dflash", "--budget", "8"], "--budget is 8", "ddtree"),
        (["--method", "ddtree", "--steps", "2"], "--steps is 2", "specdiff"),
        (["--method", "ddtree", "--branches", "3"], "--branches is 3", "d2sd"),
        (["--method", "ngram"], "--drafter is ", "dflash"),
        (
            ["--method", "ngram", "--drafter", "none", "--drafter-bits", "8"],
            "--drafter-bits is 8",
            "",
        ),
        (["--method", "dflash", "--second-drafter", "x"], "--second-drafter is x", "d2sd"),
        (["--top-k", "5"], "--top-k is 5", "--temperature"),
        (["--top-p", "0.9"], "--top-p is 0.9", "--temperature"),
        (["--acceptance", "reject"], "--acceptance is reject", "--temperature"),
        (["--exact", "--temperature", "1"], "--exact is for greedy", "temperature 0"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(ask, options, refused, offered):
    result = ask(*PROMPT, *options)
    assert_refused(result, refused)
    assert offered in result.err


def test_a_drafter_by_the_name_of_none_is_no_drafter(command, folders):
    options = [*PROMPT, "--model", folders["model"], "--drafter", "none", "--max-tokens", "8"]
    assert command(generate.main, *options, "--method", "none", "--json").code == 0
    assert command(generate.main, *options, "--json").answer["method"] == "ngram"


@pytest.mark.parametrize(
    ("model", "drafter", "options", "message"),
    [
        ("model", "wide", [], "hidden_size 128, but"),
        ("model", "model", [], "is a target, not a drafter"),
        ("bare", "drafter", [], "this model has no chat template; add --raw"),
        ("strict", "drafter", ["--system", "be brief"], "System role not supported"),
    ],
    ids=["another drafter", "no drafter", "no template", "a template that refuses"],
)
def test_a_pair_that_does_not_serve_is_one_sentence(ask, folders, model, drafter, options, message):
    pair = ["--model", folders[model], "--drafter", folders[drafter]]
    assert_refused(ask(*PROMPT, *pair, *options), message)


@pytest.mark.parametrize("main", [generate.main, chat.run], ids=["generate", "chat"])
def test_a_model_without_a_known_drafter_looks_up_n_grams_and_says_so_in_one_line(
    command, folders, main
):
    options = [*PROMPT, "--model", folders["model"], "--max-tokens", "24"]
    result = command(main, *options)
    said, figures = result.err.splitlines()
    assert result.code == 0 and "tok/s" in figures
    assert said.startswith(f"no drafter is known for {folders['model']}, so ")
    assert "n-gram" in said and "--drafter" in said
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
        ([], b"hello"),
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
