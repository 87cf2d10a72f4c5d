"""`config.toml`: what it sets, how it gives way, wrong lines as sentences, and writing."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys

import pytest

from dflash_chat import main as chat
from dflash_mlx import DFlashError
from dflash_mlx.cli import generate, user_config
from dflash_mlx.cli.options import read_decode_config, read_options, read_pair_config
from dflash_mlx.cli.user_config import ADVISED, FaceConfig, UserConfig, parse
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.option import values_given
from dflash_mlx.serve import command as serve

MINE = """# for the evening
model = "owner/mine"  # the good one
drafter = "owner/guesses"

temperature = 0.5
max_tokens = 7
stop = ["END", "###"]
lookup = false
budget = "auto"
system = "be brief"

# my keys
[keys]
settings = "f6"
"""


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(MINE, encoding="utf-8")
    return file


def given(file, *argv, parser=generate.parser):
    return parse(parser(), [*argv, "--config", str(file)])


# Reading


@pytest.mark.parametrize(
    ("parser", "argv"),
    [(generate.parser, ["--prompt", "x"]), (serve.parser, []), (chat._parser, [])],
    ids=["generate", "serve", "chat"],
)
def test_three_commands_begin_with_what_the_file_says_and_what_was_typed_wins(file, parser, argv):
    arguments = given(file, *argv, parser=parser)
    config = read_decode_config(arguments)
    assert (config.sampling.temperature, config.max_tokens) == (0.5, 7)
    assert (config.stop, config.lookup, config.budget) == (("END", "###"), False, None)
    pair = read_pair_config(arguments)
    assert (pair.model, pair.drafter) == ("owner/mine", "owner/guesses")
    typed = ["--temperature", "0", "--stop", "x", "--lookup", "--model", "other/one"]
    arguments = given(file, *argv, *typed, parser=parser)
    config = read_decode_config(arguments)
    assert (config.sampling.temperature, config.stop, config.lookup) == (0, ("x",), True)
    pair = read_pair_config(arguments)
    assert (pair.model, pair.drafter) == ("other/one", None), "it drafts for the other model"
    nothing = parse(parser(), [*argv, "--config", "none"])
    assert read_decode_config(nothing) == DecodeConfig(options=read_decode_config(nothing).options)
    assert read_pair_config(nothing) == PairConfig()


def test_the_file_is_in_the_platform_s_place_and_none_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert UserConfig(None).values == {}
    place = UserConfig(None).file
    assert place.name == "config.toml" and place.parent.name == "dflash-chat"
    place.parent.mkdir(parents=True)
    place.write_text('theme = "light"\n')
    assert read_options(parse(chat._parser(), []), FaceConfig).theme == "light"
    place.write_text("temperature = -1\n")
    with pytest.raises(DFlashError, match="line 1"):
        parse(chat._parser(), [])


def test_the_system_prompt_is_for_questions_not_for_whole_conversations_or_plain_text(
    file, ask, tmp_path
):
    file.write_text('system = "be"\n')
    kept = ask("--prompt", "hello", "--config", str(file), "--json").answer
    assert kept["tokens"] == ask("--prompt", "hello", "--system", "be", "--json").answer["tokens"]
    plain = ask("--prompt", "hello", "--json").answer["tokens"]
    typed = ask("--prompt", "hello", "--config", str(file), "--system", "", "--json").answer
    assert kept["tokens"] != plain and typed["tokens"] != kept["tokens"]
    (messages := tmp_path / "talk.json").write_text(
        json.dumps([{"role": "user", "content": "hello"}])
    )
    talk = ask("--messages", str(messages), "--config", str(file), "--json").answer
    assert talk["tokens"] == plain
    assert ask("--prompt", "hello", "--raw", "--config", str(file)).code == 0


@pytest.mark.parametrize(
    ("lines", "typed", "wanted"),
    [
        ("method = 'd2sd'\nbranches = 3", ["--method", "none"], {"method": "none"}),
        ("drafter = 'owner/x'", ["--method", "ngram"], {"method": "ngram"}),
        ("method = 'ngram'\ndrafter = 'owner/x'", [], {"method": "ngram"}),
        ("method = 'dflash'", ["--drafter", "none"], {"method": "auto"}),
        ("method = 'none'", ["--drafter", "none"], {"method": "none"}),
        ("exact = true", ["--temperature", "1"], {"exact": False}),
        ("temperature = 1", ["--exact"], {"exact": True}),
        ("top_p = 0.9", [], {"method": "auto"}),
    ],
)
def test_what_does_not_go_with_the_typed_options_gives_way_to_them(file, lines, typed, wanted):
    file.write_text(lines)
    arguments = given(file, "--prompt", "x", *typed)
    config = read_decode_config(arguments)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert values_given(config.options) == {}
    asked = "none" if "--drafter" in typed else None
    assert read_pair_config(arguments).drafter == asked


# What is wrong


WRONG = [
    ('model = "x', 1, "is not TOML", "quotes"),
    ("a = 1\na = 2", 2, "is not TOML", "already"),
    ("# mine\ntop-p = 0.9", 2, "top-p is not known", "write top_p"),
    ('# mine\n\ntemprature = "x"', 3, "temprature", "write temperature"),
    ("zzz = 1", 1, "zzz is not known", "max_tokens, "),
    ('"max tokens" = 1', 1, "max tokens is not known", "max_tokens"),
    ("config = 'x'", 1, "config is not known", "write system, "),
    ("[sampling]\ntemperature = 1", 1, "sampling is not known", ""),
    ("top_p = 3.0", 1, "top_p is 3.0", "above 0 and up to 1"),
    ("temperature = nan", 1, "temperature is nan", "0 to 10"),
    ("temperature = 'hot'", 1, "temperature is 'hot'", "a number"),
    ("max_tokens = 1.5", 1, "max_tokens is 1.5", "a whole number"),
    ("max_tokens = true", 1, "max_tokens is True", "a whole number"),
    ("max_tokens = 0", 1, "max_tokens is 0", "1 or more"),
    ("lookup = 1", 1, "lookup is 1", "true or false"),
    ("stop = 'END'", 1, "stop is 'END'", "a list of texts"),
    ("stop = ['']", 1, "stop is ''", ""),
    ("model = 5", 1, "model is 5", "a text"),
    ("method = 'magic'", 1, "method is 'magic'", "one of auto, none"),
    ("theme = 'blue'", 1, "theme is 'blue'", "one of auto, dark, light"),
    ("kernels = 'x'", 1, "kernels is 'x'", "one of"),
    ("branches = 0", 1, "branches is 0", "1 to"),
    ("budget = 'some'", 1, "budget is 'some'", ""),
    ("keys = 5", 1, "keys is 5", "a table"),
    ("theme = 'dark'\n[keys]\ndraft = 5", 3, "draft is 5", "a text"),
    ("keys.draft = ['f5']", 1, "draft is ['f5']", "a text"),
    ("[keys.draft]\nkey = 'f5'", 1, "draft is {'key': 'f5'}", "a text"),
    ("template = ['a']", 1, "template is 'a'", "KEY=VALUE"),
    ("temperature = 1\nexact = true", 2, "exact is for greedy", "temperature 0"),
    ("method = 'none'\nbranches = 2", 2, "branches is 2, but none", "d2sd"),
    ('system = """\ntop_k = 3\n"""\ntop_k = -3', 4, "top_k is -3", "0 or more"),
    ("a = " + "[" * 5000, 1, "is not TOML", ""),
    ("a = {b = 1, b = 2}", 1, "is not TOML", ""),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0][:30])
def test_a_wrong_line_is_one_sentence_with_the_file_and_the_line(case, file, command):
    text, line, *fragments = case
    file.write_text(text)
    for main, argv in ((generate.main, ["--prompt", "x"]), (chat.run, ["--prompt", "x"])):
        result = command(main, *argv, "--config", str(file))
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert f"line {line} of {file}" in result.err
        assert [part for part in fragments if part not in result.err] == []
    assert file.read_text() == text


def spoilt(file, how):
    """A file that cannot be read, and a word about why; root may read whatever has no rights."""
    if how == "folder":
        file.unlink()
        file.mkdir()
        return "directory"
    file.write_bytes(b"theme = '\xff'")
    return "utf-8"


@pytest.mark.parametrize("how", ["folder", "bytes"])
def test_an_unreadable_file_is_told_once_and_stays(file, how, ask, folders, monkeypatch):
    word = spoilt(file, how)
    named = ask("--prompt", "hello", "--config", str(file))
    assert named.code == 2 and word in named.err and str(file) in named.err
    monkeypatch.setattr(user_config.platformdirs, "user_config_path", lambda name: file.parent)
    usual = ask("--prompt", "hello")
    assert usual.code == 0 and usual.err.count(str(file)) == 1 and word in usual.err
    assert "stays as it is" in usual.err
    assert UserConfig(None).keep({"theme": "light"}) == ""
    assert file.is_dir() or file.read_bytes() == b"theme = '\xff'"


def test_a_file_that_is_not_there_is_one_sentence_only_where_it_was_named(tmp_path, ask):
    missing = ask("--prompt", "hello", "--config", str(tmp_path / "none.toml"))
    assert missing.code == 2 and "none.toml cannot be read" in missing.err
    assert "stays" not in missing.err


def test_of_a_model_that_is_gone_the_line_that_names_it_is_told(file, command, folders):
    gone = file.parent / "gone"
    file.write_text(f'# mine\nmodel = "{gone}"\n')
    for main in (generate.main, chat.run):
        result = command(main, "--prompt", "x", "--config", str(file))
        assert result.code == 2 and f"line 2 of {file}: there is no folder '{gone}'" in result.err
        typed = command(main, "--prompt", "x", "--config", str(file), "--model", f"{gone}-too")
        assert typed.code == 2 and f"{gone}-too" in typed.err and str(file) not in typed.err


# Sampling of the model's makers


def advised(**raw):
    config = UserConfig()
    return config, config.advise(DecodeConfig(), raw).sampling


def test_sampling_begins_with_what_the_model_s_makers_advise():
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    config, sampling = advised(**qwen, repetition_penalty=1.5)
    assert sampling == SamplingConfig(temperature=0.6, top_k=20, top_p=0.95)
    assert config.origins == dict.fromkeys(("temperature", "top_p", "top_k"), ADVISED)
    assert advised(do_sample=True, top_k=64)[1] == SamplingConfig(temperature=1, top_k=64)
    assert advised(temperature=0.3)[1].temperature == 0.3
    for greedy in ({}, {"do_sample": False, "temperature": 0.6}, {"eos_token_id": 2}):
        assert advised(**greedy)[1] == SamplingConfig()
    wrong = {"temperature": "hot", "top_p": None, "top_k": -1, "min_p": 0.1}
    assert advised(**wrong)[1] == SamplingConfig(min_p=0.1)


def test_the_user_s_choice_stays_and_the_advice_of_another_model_goes():
    config, first = UserConfig(), {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    config.origins["temperature"] = "the command line"
    start = DecodeConfig(sampling=SamplingConfig(temperature=0.2))
    decode = config.advise(start, first)
    assert (decode.sampling.temperature, decode.sampling.top_p) == (0.2, 0.95)
    assert config.advise(decode, {}) == start
    assert "top_p" not in config.origins
    exact = DecodeConfig(exact=True)
    assert UserConfig().advise(exact, first) == exact


def test_a_folder_s_generation_config_comes_with_the_pair(tiny_pair_with):
    assert tiny_pair_with('{"temperature": 0.4}') == {"temperature": 0.4}
    assert tiny_pair_with("[") == tiny_pair_with(None) == {}


@pytest.fixture
def tiny_pair_with(tmp_path):
    from dflash_mlx.models.load import load_pair
    from support.models import write_model

    def load(text):
        folder = write_model(tmp_path / str(len(list(tmp_path.iterdir()))))
        if text is not None:
            (folder / "generation_config.json").write_text(text)
        return load_pair(PairConfig(str(folder))).advised

    return load


# Writing


def test_what_is_kept_is_read_again_and_comments_and_order_stay(file):
    config = UserConfig(str(file))
    said = config.keep({"temperature": 0.7, "model": None, "stop": ("a", "b"), "theme": "light"})
    assert str(file) in said
    text = file.read_text()
    changed = ("model", "temp", "stop")
    rest = [line for line in MINE.splitlines() if line and not line.startswith(changed)]
    assert [line for line in text.splitlines() if line in rest] == rest
    values = UserConfig(str(file)).values
    assert (values["temperature"], values["stop"], values["theme"]) == (0.7, ("a", "b"), "light")
    assert "model" not in values and values["keys"] == {"settings": "f6"}
    assert UserConfig().keep({"theme": "light"}) == config.keep({}) == ""


def test_a_new_file_is_made_with_its_folder_and_changes_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(
        user_config.platformdirs, "user_config_path", lambda name: tmp_path / "a" / "b"
    )
    one, other = UserConfig(None), UserConfig(None)
    assert one.keep({"theme": "dark"})
    other.keep({"max_tokens": 9})
    assert UserConfig(None).values == {"theme": "dark", "max_tokens": 9}


def test_a_link_stays_a_link_and_rights_stay_as_they_are(tmp_path, file):
    file.chmod(0o600)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    UserConfig(str(link)).keep({"theme": "light"})
    assert link.is_symlink() and not file.is_symlink()
    assert UserConfig(str(file)).values["theme"] == "light"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("why", ["read-only", "full", "not TOML any more", "not together"])
def test_a_file_that_cannot_be_written_is_one_sentence_and_stays(file, why, monkeypatch):
    config = UserConfig(str(file))
    if why == "read-only":
        file.chmod(0o400)
    elif why == "full":
        monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    elif why == "not TOML any more":
        file.write_text("model = ")
    before = file.read_bytes()
    changes = {"exact": True} if why == "not together" else {"theme": "light"}
    with pytest.raises(DFlashError, match=str(file)):
        config.keep(changes)
    assert file.read_bytes() == before
    assert [*file.parent.iterdir()] == [file]


KILLED = """
import os, signal, sys
from dflash_mlx.cli.user_config import UserConfig
config = UserConfig(sys.argv[1])
sync = os.fsync
def kill(descriptor):
    sync(descriptor)
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = kill
config.keep({"theme": "light"})
"""


def test_a_kill_during_the_write_leaves_the_old_file_and_the_next_one_clears_up(file):
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert file.read_text() == MINE
    assert len(os.listdir(file.parent)) == 2, "what the killed one wrote"
    UserConfig(str(file)).keep({"theme": "dark"})
    assert os.listdir(file.parent) == [file.name]
    assert UserConfig(str(file)).values["theme"] == "dark"
