"""What is typed arrives as it was typed, whatever the alphabet and however fast."""

import pytest
from textual import events
from textual.widgets import Input

from support.app_scripts import in_chat

PERSIAN, FAMILY = "می\u200cخواهم", "\U0001f469\u200d\U0001f469\u200d\U0001f467"


def typed(app, keys):
    """Keys at once, without waiting for any of them."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


@pytest.mark.parametrize("text", [PERSIAN, FAMILY, "a\u200fb"], ids=["Persian", "family", "mark"])
def test_joiners_reach_the_question_and_the_fields(text, tmp_path):
    @in_chat()
    async def steps(chat, app, backend):
        typed(app, text)
        await chat.until(lambda: app.prompt.text == text)
        await chat.press("enter")
        await chat.until(lambda: backend.requests)
        assert backend.asked == [text]
        await chat.is_over()
        await chat.say("/open")
        await chat.until(lambda: app.screen.query("#search"))
        typed(app, text)
        await chat.until(lambda: app.screen.query_one("#search", Input).value == text)

    steps(tmp_path=tmp_path)


@in_chat()
async def test_a_field_keeps_the_order_of_fast_keys(chat, app):
    await chat.say("/open")
    await chat.until(lambda: app.screen.query("#search"))
    await chat.pause()
    field = app.screen.query_one("#search", Input)
    typed(app, [*"topic42", *["backspace"] * 7, *"hacked"])
    await chat.until(lambda: "d" in field.value)
    assert field.value == "hacked"


@in_chat()
async def test_the_line_of_input_keeps_the_order_of_fast_keys(chat, app):
    typed(app, [*"topic42", *["backspace"] * 7, *"hacked"])
    await chat.until(lambda: "d" in app.prompt.text)
    await chat.pause()
    assert app.prompt.text == "hacked"
