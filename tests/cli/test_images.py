"""`generate --image`: pictures are checked before a model is loaded, and come before the words."""

from __future__ import annotations

import json

import pytest

from dflash_mlx.core.prompt import Prompt
from support.pictures import picture


@pytest.fixture
def shot(tmp_path):
    file = tmp_path / "shot.png"
    file.write_bytes(picture("red", (9, 7)))
    return str(file)


@pytest.fixture
def seen(monkeypatch):
    """What a target that is said to see is shown."""
    found = []

    def read(target, tokenizer, messages, **options):
        found.append((messages, options))
        return Prompt.of(tokenizer.encode("words"))

    monkeypatch.setattr("dflash_mlx.vision.prompts.read_prompt", read)
    monkeypatch.setattr("dflash_mlx.verifier.model.Target.sees", True)
    return found


def test_pictures_come_before_the_last_words(ask, seen, shot, tmp_path):
    assert ask("--prompt", "what?", "--image", shot, "--image", shot).code == 0
    (message,), options = seen[0]
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    assert message["content"][0]["picture"].width == 9
    assert options["add_generation_prompt"]
    talk = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    asked = ["--messages", str(tmp_path / "talk.json"), "--image", shot, "--system", "short"]
    assert ask(*asked).code == 0
    contents = [each["content"] for each in seen[1][0]]
    assert contents[:3] == ["short", "user", "assistant"]
    assert contents[3][-1] == {"type": "text", "text": "user"}


def test_a_model_that_does_not_see_is_named(ask, shot, folders):
    found = ask("--prompt", "what?", "--image", shot)
    assert found.code == 2 and "does not see" in found.err and folders["model"] in found.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--image", "/no/such.png"], "/no/such.png"),
        (["--image", "https://a.example/a.png"], "--allow-image-urls"),
        (["--image", "http://a.example/a.png", "--allow-image-urls"], "http://a.example/a.png"),
        (["--image", "https://127.0.0.1/a.png", "--allow-image-urls"], "127.0.0.1"),
    ],
)
def test_what_is_no_picture_ends_before_the_model_is_loaded(ask, monkeypatch, words, told):
    monkeypatch.setattr("dflash_mlx.cli.options.load_pair", None)
    found = ask("--prompt", "what?", *words)
    assert found.code == 2 and told in found.err and len(found.err.splitlines()) == 1


def test_a_raw_prompt_takes_no_picture_and_an_address_may_be_read(ask, seen, shot, monkeypatch):
    assert ask("--prompt", "a", "--raw", "--image", shot).code == 2
    monkeypatch.setattr("dflash_mlx.cli.generate.fetch", lambda address: picture())
    asked = ["--prompt", "a", "--image", "https://a.example/a.png", "--allow-image-urls"]
    assert ask(*asked).code == 0 and seen[0][0][0]["content"][0]["picture"].width == 8
