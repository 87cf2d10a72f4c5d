"""Slash commands: copying an answer, completing a name, and what they say."""

import pytest

from dflash_chat.commands import COMMANDS, completions
from dflash_chat.conversation import code_blocks
from support.app_scripts import (
    ANSWER,
    ScriptedBackend,
    answered,
    in_chat,
    notices,
    say,
    screen_text,
    until,
)

# Copying


@in_chat(lambda: ScriptedBackend(["<think>hm</think>" + ANSWER + "\n\n~~~\nmore\n~~~\n"]))
async def test_an_answer_or_one_of_its_code_blocks_is_copied(app, pilot, backend):
    await say(app, pilot, "/copy")
    assert "ask something first" in notices(app)[-1]
    await answered(app, pilot)
    await say(app, pilot, "/copy")
    assert app.clipboard == ANSWER + "\n\n~~~\nmore\n~~~"
    await say(app, pilot, "/copy 1")
    assert app.clipboard == 'def rivers() -> list[str]:\n    return ["Rhine", "Main"]\n'
    await say(app, pilot, "/copy 2")
    assert app.clipboard == "more\n"
    for wrong in ("3", "0", "x", "9" * 5000):
        await say(app, pilot, f"/copy {wrong}")
        assert "has 2 code blocks" in notices(app)[-1]
    assert app.clipboard == "more\n"


@in_chat(lambda: ScriptedBackend(["a\x1b[201~b\ud800"]))
async def test_what_is_copied_commands_no_terminal_that_it_is_pasted_into(app, pilot, backend):
    await answered(app, pilot)
    await say(app, pilot, "/copy")
    assert app.clipboard == "a[201~b?"


def test_code_blocks_are_found_wherever_markdown_has_them():
    text = "1. a\n   ```py\n   x\n   ```\n\n````\n```\nin\n```\n````\n\n    indented\n\n```\nopen\n"
    assert code_blocks(text) == ["x\n", "```\nin\n```\n", "indented\n", "open\n"]


# Completing commands


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("/", [command.name for command in COMMANDS]),
        ("/MOD", ["model"]),
        ("/me", ["method"]),
        ("/re", ["retry", "rename"]),
        *[(typed, []) for typed in ("", "m", "/x", "/model ", "/usr/bin", "//", "/re\n")],
    ],
)
def test_a_beginning_is_completed_to_the_commands_that_have_it(typed, names):
    assert [command.name for command in completions(typed)] == names


@in_chat()
async def test_commands_are_offered_while_they_are_typed_and_tab_completes(app, pilot, backend):
    await pilot.press("/", "r")
    assert "/race" in screen_text(app) and "/rename" in screen_text(app)
    await pilot.press("e", "n")
    assert "/rename title  name this conversation" in screen_text(app)
    await pilot.press("tab")
    assert app.prompt.text == "/rename ", "and goes on to what it needs"
    assert app.prompt.has_focus
    app.prompt.text, before = "", app.theme
    await pilot.press(*"/the", "tab", "enter")
    await until(lambda: app.theme != before, pilot)
    assert app.prompt.text == ""
    await pilot.press("h", "i")
    assert not app.prompt.suggestion
    assert "Tab completes" not in screen_text(app)


@in_chat()
async def test_the_rest_of_a_command_is_shown_behind_the_cursor_alone(app, pilot, backend):
    await pilot.press(*"/expo")
    assert app.prompt.suggestion == "rt"
    await pilot.press("left")
    await until(lambda: not app.prompt.suggestion, pilot)
    await pilot.press("end", "right")
    assert app.prompt.text == "/export"


# Words of the chat


@in_chat()
async def test_a_temperature_that_makes_noise_is_set_with_a_warning(app, pilot, backend):
    await say(app, pilot, "/temperature 0.7")
    assert notices(app)[-1] == "The temperature is 0.7."
    await say(app, pilot, "/temperature 5")
    assert app.config.sampling.temperature == 5
    assert "noise" in notices(app)[-1]
