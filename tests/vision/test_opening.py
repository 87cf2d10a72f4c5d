"""Folders of models that see: opened by name, their towers at the first picture and not before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm, the extra vision, is not installed")

from mlx.utils import tree_flatten

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.delta import collect
from dflash_mlx.models.load import load
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.verifier.model import Target
from dflash_mlx.vision.opening import opens
from dflash_mlx.vision.prompts import read_prompt
from dflash_mlx.vision.target import SeeingTarget
from support.decoding import finish
from support.seeing import make_whole, message, picture
from support.seeing_families import FAMILIES
from support.tiny_seeing import write_folder

pytestmark = pytest.mark.usefixtures("interpreted")


def in_a_thread(work: Callable[[], Any]) -> list[Any]:
    """What a server's thread finds, which is not the one that runs passes."""
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("seeing") / "tiny-vl")


def test_a_folder_is_opened_and_its_answer_about_a_picture_is_mlx_vlms_own(folder):
    pair = load(str(folder))
    target = pair.target
    assert isinstance(target, SeeingTarget) and target.sees
    messages = [message("What is ", picture(1, 2, 1), picture(2, 1, 2), "?")]
    (prompt,) = in_a_thread(lambda: read_prompt(target, pair.tokenizer, messages))
    assert [piece.length for piece in prompt.pieces] == [8, 8]
    scheduler = Scheduler(pair)
    config = DecodeConfig("ngram", max_tokens=8)
    sequence = scheduler.submit(prompt, config)
    words = collect(iter(finish(scheduler)[sequence])).tokens

    whole = target.eyes.whole
    text = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"},
                                      {"type": "image"}, {"type": "text", "text": "?"}]}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    inputs = target.eyes.process(text, [picture(1, 2, 1), picture(2, 1, 2)])
    assert inputs["input_ids"][0].tolist() == list(prompt.tokens)
    tokens, beside = inputs.pop("input_ids"), inputs
    beside.pop("attention_mask")
    for word in words:
        logits = whole(tokens, **beside).logits[0, -1]
        assert int(mx.argmax(logits)) == word
        tokens = mx.concatenate([tokens, mx.array([[word]], tokens.dtype)], axis=1)


def test_words_alone_read_no_weight_of_the_tower(folder):
    pair = load(str(folder))
    tower = pair.target.eyes.whole.vision_tower
    mx.synchronize()
    mx.clear_cache()
    scheduler = Scheduler(pair)
    said = pair.tokenizer.apply_chat_template([{"role": "user", "content": "Hi?"}])
    sequence = scheduler.submit(said, DecodeConfig("none", max_tokens=4))
    finish(scheduler)
    before = mx.get_active_memory()
    mx.eval(tower.parameters())
    size = sum(array.nbytes for _, array in tree_flatten(tower.parameters()))
    assert sequence.statistics.generated_tokens and pair.target.eyes.looked == 0
    assert mx.get_active_memory() - before >= 0.9 * size


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_what_mlx_vlm_opens_is_known_from_the_config_alone(family):
    raw = {"model_type": family, **FAMILIES[family]}
    assert opens(raw)
    assert not opens({"model_type": "llama"}), "mlx-lm has it"
    assert not opens({"model_type": "nobody_knows"}) and not opens({"model_type": "../x"})
    assert opens({"model_type": "hy_v4"}) and opens({"model_type": "glm5_next"})


def test_a_model_whose_files_have_no_tower_is_opened_by_mlx_lm_and_sees_nothing(tmp_path):
    folder = write_folder(tmp_path / "towerless", "qwen3_5")
    assert load(str(folder)).target.sees
    file = str(folder / "model.safetensors")
    words = {k: v for k, v in mx.load(file).items() if not k.startswith("vision_tower")}
    mx.save_safetensors(file, words, metadata={"format": "mlx"})
    target = load(str(folder)).target
    assert type(target) is Target and not target.sees


def test_a_family_that_cannot_take_drafts_back_is_refused_by_name():
    whole = make_whole("qwen3_vl")
    language = whole.language_model

    class Kept:
        pass

    language.__class__ = type("Odd", (type(language),), {"make_cache": lambda self: [Kept()] * 3})
    with pytest.raises(DFlashError, match="Kept"):
        SeeingTarget(whole, 100, "odd")


def turning_all_alike(attention: Any) -> None:
    """Let an attention rotate all rows as the first, by a module that nobody finds."""
    rope = attention.pop("rope")

    def turn(x: mx.array, offset: Any = 0) -> mx.array:
        return rope(x, offset[0] if isinstance(offset, mx.array) and offset.ndim else offset)

    kind = type(attention)
    attention.__class__ = type("Alike", (kind,), {"rope": staticmethod(turn)})


def test_a_family_whose_rows_have_one_position_drafts_chains_only():
    whole = make_whole("smolvlm")
    for layer in whole.language_model.layers:
        turning_all_alike(layer.self_attn)
    target = SeeingTarget(whole, 100, "stubborn")
    assert not target.takes_trees
    with pytest.raises(DFlashError, match="stubborn"):
        target.check_trees()


def test_nothing_of_mlx_vlm_or_pillow_is_imported_before_a_model_that_sees():
    code = "import sys; import dflash_mlx.models.load, dflash_mlx.session.session; "
    code += "print([name for name in ('mlx_vlm', 'PIL') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
