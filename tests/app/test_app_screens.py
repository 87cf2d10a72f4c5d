"""Commands, settings, pickers, views and races in the chat."""

import re
import sys
import threading

from textual.widgets import Digits, Input, Static

from dflash_chat.conversation import Turn
from dflash_chat.draft_panel import ANSWERS
from dflash_chat.race_screen import RaceScreen
from dflash_chat.screens import RowsScreen
from dflash_chat.settings_screen import SettingsScreen
from dflash_chat.welcome import QUESTIONS
from dflash_mlx.client import DecodeConfig, DFlashError, RaceResult
from dflash_mlx.engine.pair import Capabilities, Preset
from support.app_scripts import (
    ANSWER,
    WORDS,
    ScriptedBackend,
    answered,
    goes_on,
    in_chat,
    notices,
    race_of,
    rounds_of,
    say,
    screen_text,
    shown_answer,
    until,
)
from support.configs import config_with


@in_chat()
async def test_a_command_that_cannot_be_run_says_what_to_do(app, pilot, backend):
    for line, sentence in (
        ("/modle x", "there is no command /modle; try /model"),
        ("/xyzzy", "/help"),
        ("/rename", "type /rename title"),
        ("/temperature warm", "temperature is 'warm'; type a number"),
        ("/temperature -1", "Temperature is -1.0; choose"),
        ("/temperature 99", "Temperature is 99.0; choose 0 to 10"),
        ("/method magic", "method is 'magic'; choose one of"),
        ("/stats", "there is no answer yet; ask something first"),
        ("/race", "nothing has been asked yet"),
    ):
        await say(app, pilot, line)
        assert sentence in notices(app)[-1]
    await answered(app, pilot)


@in_chat()
async def test_method_and_temperature_hold_for_the_next_answer(app, pilot, backend):
    await say(app, pilot, "/method ngram")
    await say(app, pilot, "/temperature 0.7")
    assert notices(app)[-1] == "The temperature is 0.7."
    await answered(app, pilot)
    config = backend.requests[0].config
    assert (config.method, config.sampling.temperature) == ("ngram", 0.7)
    assert "n-gram lookup" in screen_text(app)
    await say(app, pilot, "/temperature 5")
    assert app.config.sampling.temperature == 5 and "noise" in notices(app)[-1]
    await say(app, pilot, "/temperature 0")
    app.set_config(config_with("d2sd", branches=3))
    await say(app, pilot, "/method dflash")
    assert "Branches is 3" in notices(app)[-1] and "/settings" in notices(app)[-1]
    assert app.config.method == "d2sd"


@in_chat(decode=DecodeConfig(method="d2sd", budget=8), size=(80, 24))
async def test_settings_show_every_option_and_apply_together(app, pilot, backend):
    await say(app, pilot, "/settings")
    screen = app.screen
    assert isinstance(screen, SettingsScreen)
    assert "Temperature" in screen_text(app) and "max_tokens" not in screen_text(app), "at its top"
    texts = " ".join(str(s.render()) for s in screen.query(Static))
    assert "stop after this many tokens" in texts
    assert "keep the k most likely tokens" in texts
    screen.query_one("#set-max_tokens", Input).value = "many"
    await pilot.press("ctrl+s")
    wanted = "Longest answer is 'many'; type a whole number"
    await until(lambda: wanted in screen_text(app), pilot)
    screen.query_one("#set-max_tokens", Input).value = "7"
    screen.query_one("#set-top_p", Input).value = "3"
    await pilot.press("ctrl+s")
    await until(lambda: "(top-p) is 3.0" in screen_text(app), pilot)
    screen.query_one("#set-top_p", Input).value = "0.9"
    screen.query_one("#set-stop", Input).value = "END, ###"
    await pilot.press("ctrl+s")
    await pilot.pause()
    assert (app.config.max_tokens, app.config.sampling.top_p) == (7, 0.9)
    assert app.config.stop == ("END", "###")
    assert app.config.method == "d2sd"
    before = app.config
    await say(app, pilot, "/settings")
    app.screen.query_one("#set-max_tokens", Input).value = "9"
    await pilot.press("escape")
    assert app.config is before, "left with escape they change nothing"
    await say(app, pilot, "/settings")
    await pilot.press("ctrl+s")
    await pilot.pause()
    assert app.config == before, "saving unchanged settings changes nothing either"


@in_chat(size=(100, 40))
async def test_help_figures_and_the_palette_of_all_commands_open_over_the_chat_and_close(
    app, pilot, backend
):
    await say(app, pilot, "/help")
    assert isinstance(app.screen, RowsScreen)
    assert "/temperature [number]" in screen_text(app)
    await pilot.press("escape")
    await answered(app, pilot)
    await pilot.press("f3")
    await pilot.pause()
    assert "2.0 times as fast" in screen_text(app)
    assert "passes of the large model" in screen_text(app), "and what it means"
    await pilot.press("f3")
    assert app.screen is app.base
    titles = [command.title for command in app.get_system_commands(app.screen)]
    assert "/race [question]" in titles
    assert "/rename title" in titles
    await pilot.press("ctrl+p")
    await pilot.press(*"theme")
    await until(lambda: "light or dark" in screen_text(app), pilot)
    before = app.theme
    await pilot.press("enter", "enter")
    await until(lambda: app.theme != before, pilot)


@in_chat(size=(120, 40))
async def test_the_draft_view_opens_beside_what_is_typed_and_closes(app, pilot, backend):
    await answered(app, pilot)
    app.prompt.text = "half a question"
    await pilot.press("f2")
    await until(lambda: "**here**" in screen_text(app), pilot)
    assert app.prompt.text == "half a question"
    assert "second draft" in screen_text(app)
    assert "because 6" in screen_text(app)
    assert "**:↵" in screen_text(app), "its tokens stand in place of its text"
    await say(app, pilot, "/draft")
    assert "second draft" not in screen_text(app)
    assert "↵" not in screen_text(app)


@in_chat(lambda: ScriptedBackend(["one **two**", "three **four**", "**five**"]), size=(120, 50))
async def test_every_answer_of_the_session_is_shown_as_its_tokens(app, pilot, backend):
    app.conversation.turns += [Turn("user", "before"), Turn("assistant", "of **another** day")]
    await app.transcript.show(app.conversation.turns)
    for question in ("a", "b"):
        await answered(app, pilot, question)
    assert "**" not in screen_text(app)
    await pilot.press("f2")
    for text in ("one **two**", "three **four**", "of another day"):
        assert text in screen_text(app)
    await say(app, pilot, "/retry")
    await until(lambda: "**five**" in screen_text(app) and app.listener.job is None, pilot)
    assert "one **two**" in screen_text(app), "in a conversation that goes on elsewhere, too"
    for number in range(ANSWERS):
        app.draft.take(rounds_of("x")[0], WORDS)
        app.draft.end(f"answer {number}")
    assert app.draft.tokens_of("answer 0") and not app.draft.tokens_of("**five**"), "in little room"
    await pilot.press("f2")
    await until(lambda: "**" not in screen_text(app), pilot)


@in_chat(size=(120, 40))
async def test_the_draft_view_goes_back_through_the_rounds_and_stays_there(app, pilot, backend):
    backend.gate = threading.Semaphore(4)
    await pilot.press("f2")
    assert "Ask something" in screen_text(app)
    await say(app, pilot, "What meets?")
    await until(lambda: app.status.figures and app.status.figures["rounds"] == 4, pilot)
    await until(lambda: "Round 4 of 4" in screen_text(app), pilot)
    app.draft.focus()
    await pilot.press("left", "left")
    assert "Round 2 of 4" in screen_text(app)
    backend.gate.release()
    await until(lambda: "Round 2 of 5" in screen_text(app), pilot)
    await pilot.press("home", "left")
    assert "Round 1 of 5" in screen_text(app)
    await pilot.press("end")
    assert "Round 5 of 5" in screen_text(app)
    await pilot.press("escape")
    assert app.focused is app.prompt
    assert app.listener.job is not None, "and nothing was stopped"
    await goes_on(app, pilot, backend)


@in_chat(size=(120, 40))
async def test_the_speed_is_large_where_there_is_room_and_every_figure_explains_itself(
    app, pilot, backend
):
    await answered(app, pilot)
    assert app.query_one("#speed-digits", Digits).value == "40.0"
    assert app.query_one("#ratio-digits", Digits).value == "~2.0"
    assert not app.query_one("#speed").display, "what is large is not said twice"
    figures = ("#speed-digits", "#ratio-digits", "#beside", "#speed", "#rounds")
    assert all(app.query_one(name).tooltip for name in figures)
    await pilot.resize_terminal(80, 24)
    await until(lambda: app.query_one("#speed").display, pilot)
    assert "40.0 tok/s · ~2.0x plain" in screen_text(app)
    assert re.search(r"speed .* up to 40.0 tok/s +accepted by position  1 .* 80%", screen_text(app))
    await say(app, pilot, "/new")
    assert "tok/s" not in screen_text(app)


# The first screen


@in_chat(size=(80, 24))
async def test_an_empty_conversation_says_what_is_loaded_and_how_to_begin(app, pilot, backend):
    for size in ((80, 24), (120, 40), (200, 60)):
        await pilot.resize_terminal(*size)
        await pilot.pause()
        shown = screen_text(app)
        for text in ("SmolLM2-135M-Instruct", "DFlash + variable-prefix", "Ctrl+J", *QUESTIONS):
            assert text in shown
        assert "tokens per second" not in shown, "there is no ground for a figure yet"
    await answered(app, pilot, " 2 ")
    assert [m["content"] for m in backend.requests[0].messages] == [QUESTIONS[1]]
    assert QUESTIONS[0] not in screen_text(app)
    await answered(app, pilot, "2")
    assert backend.requests[1].messages[-1]["content"] == "2", "a number is a number from now on"
    await until(lambda: app.speeds.earlier("SmolLM2-135M-Instruct", "d2sd"), pilot)
    await say(app, pilot, "/new")
    await until(lambda: "~40.0 tokens per second, ~2.0x plain" in screen_text(app), pilot)


@in_chat(size=(200, 60))
async def test_a_clicked_question_goes_into_the_line_and_a_conversation_begins_at_the_top(
    app, pilot, backend
):
    await pilot.click(app.query(".sample").last())
    assert app.prompt.text == QUESTIONS[-1]
    assert app.focused is app.prompt
    await answered(app, pilot, "word " * 100)
    question = app.query(".question").first()
    assert question.region.y <= 3
    assert question.region.width <= 100
    left, right = question.region.x, 200 - question.region.right
    assert abs(left - right) <= 2, "in the middle"


@in_chat(size=(120, 40))
async def test_a_race_runs_on_the_last_question_and_leaves_no_trace(app, pilot, backend):
    await answered(app, pilot, "What meets?")
    backend.race_steps = [*race_of(ANSWER, 12), RaceResult("All 12 tokens are the same.", True)]
    await pilot.press("f4")
    await until(lambda: isinstance(app.screen, RaceScreen) and app.screen.over, pilot)
    assert "12 tokens  0.3 s  40.0 tok/s  done" in screen_text(app)
    assert [side.border_title for side in app.screen.query(".faster")] == [
        "with drafts, several tokens in a pass"
    ]
    assert [m["content"] for m in backend.requests[-1].messages] == ["What meets?"]
    await pilot.press("escape")
    await answered(app, pilot, "on")
    assert len(app.conversation.turns) == 4


@in_chat(lambda: ScriptedBackend(gate=threading.Semaphore(3)))
async def test_a_race_can_be_stopped_and_can_fail(app, pilot, backend):
    backend.race_steps = race_of(ANSWER, 12)
    await say(app, pilot, "/race What meets?")
    await until(lambda: "2 tokens" in screen_text(app), pilot)
    await pilot.press("ctrl+c")
    assert app.screen is app.base
    backend.gate.release(100)
    backend.race_steps = [DFlashError("the method is none", "choose another /method")]
    await say(app, pilot, "/race again")
    await until(lambda: "choose another /method" in screen_text(app), pilot)
    await pilot.press("escape")
    await answered(app, pilot)


@in_chat(lambda: ScriptedBackend(waits="load"))
async def test_what_is_printed_while_loading_is_shown_as_progress(app, pilot, backend):
    assert "loading SmolLM2" in screen_text(app)
    app.read_output("\r unpacking:  45%|████      | 44.1M/98.4M")
    await until(lambda: "unpacking" in screen_text(app), pilot)
    assert "45%" in screen_text(app)
    backend.held.set()
    await until(lambda: app.pair and not app.listener.waiting, pilot)
    app.read_output("a warning from a library\n")
    await pilot.pause()
    assert "unpacking" not in screen_text(app)
    assert "warning" not in screen_text(app)


@in_chat(lambda: ScriptedBackend(waits="measure"), decode=DecodeConfig())
async def test_timing_the_machine_shows_how_far_it_is_and_blocks_no_keys(app, pilot, backend):
    await until(lambda: app.pair and app.listener.waiting, pilot)
    sys.stderr.write("\rtiming this machine, once:  50%|████      | 6/12")
    await until(lambda: "timing this machine, once" in screen_text(app), pilot)
    assert "50%" in screen_text(app)
    await pilot.press("h", "i")
    assert app.prompt.text == "hi"
    await pilot.press("enter")
    await until(lambda: app.listener.job is not None, pilot)
    assert backend.requests == [], "it waits its turn"
    await goes_on(app, pilot, backend)
    assert "timing" not in screen_text(app)
    assert shown_answer(app) == ANSWER


@in_chat(
    lambda: ScriptedBackend(capabilities=Capabilities(("dflash",) * 2, preset=Preset("ddtree"))),
    decode=DecodeConfig(),
)
async def test_the_method_says_what_auto_is_with_this_model(app, pilot, backend):
    assert "DFlash tree" in screen_text(app)
    await say(app, pilot, "/method")
    assert notices(app) == ["The method is auto, which is ddtree with this model."]
    await say(app, pilot, "/method ngram")
    assert notices(app)[1:] == ["The method is ngram."]
    assert "n-gram lookup" in screen_text(app)
