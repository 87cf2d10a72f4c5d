"""Pictures from the doors to a real tower: the server and the command line, on a tiny model."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm, the extra vision, is not installed")

from dflash_mlx.cli import generate
from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.models.load import load
from dflash_mlx.session.models import Model
from support.seeing import picture
from support.serving import CHAT, MODEL, serving, speak
from support.tiny_seeing import write_folder

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("doors") / "tiny-vl")


def part(seed: int) -> dict[str, object]:
    url = "data:image/png;base64," + b64encode(picture(seed, 2, 1).data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def test_the_server_shows_pictures_to_a_tower_and_reads_them_once(folder):
    with serving(speak, DecodeConfig("ngram", max_tokens=8)) as server:
        pair = server.worker.call(lambda: load(str(folder))).result()  # as the server's first one
        server.models.by_name[MODEL].pair = pair

        def ask(*messages: object) -> tuple[str, int, int]:
            body = {"model": MODEL, "messages": messages, "logprobs": True}
            found = server.post(CHAT, body)
            assert found.status_code == 200, found.text
            told = found.json()
            used = told["usage"]
            cached = used["prompt_tokens_details"]["cached_tokens"]
            words = [each["token"] for each in told["choices"][0]["logprobs"]["content"]]
            return json.dumps(words), used["prompt_tokens"], cached

        def first(seed: int) -> dict[str, object]:
            words = {"type": "text", "text": "What is it? "}
            return {"role": "user", "content": [words, part(seed), words]}

        said, prompt, cached = ask(first(1))
        assert cached == 0 and pair.target.eyes.looked == 1
        other, _, cached = ask(first(2))
        assert cached < 30 and pair.target.eyes.looked == 2
        again = {"role": "assistant", "content": "so"}, {"role": "user", "content": "And?"}
        assert ask(first(1), *again)[2] >= prompt - 12, "the picture is not read again"
        assert pair.target.eyes.looked == 2
        assert ask(first(1))[0] == said and ask(first(2))[0] == other


def test_the_server_shows_pictures_to_a_model_that_it_loads_later_in_another_thread(folder):
    later = Model(("later",), lambda: load(str(folder)))
    words = {"type": "text", "text": "What is it? "}
    asked = {"role": "user", "content": [part(1), words]}
    begun = {"role": "assistant", "content": "It"}
    with serving(speak, DecodeConfig("ngram", max_tokens=4), further=[later]) as server:
        for messages in ([asked], [asked, begun]):  # the second asks for more of an answer
            body = {"model": "later", "messages": messages}
            if begun in messages:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            found = server.post(CHAT, body)
            assert found.status_code == 200, found.text
        assert later.pair.target.eyes.looked == 1


def test_generate_shows_pictures_to_a_tower(folder, tmp_path, capsys):
    (tmp_path / "shot.png").write_bytes(picture(1).data)
    words = ["--model", str(folder), "--drafter", "none", "--max-tokens", "8", "--json"]
    told = []
    for more in (["--image", str(tmp_path / "shot.png")], []):
        generate.main([*words, "--prompt", "What is it?", *more])
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["prompt_tokens"] > told[1]["prompt_tokens"]
    assert cli.BAD_INPUT == 2
