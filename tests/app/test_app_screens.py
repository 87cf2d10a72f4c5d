"""Commands, settings, pickers, views and races in the chat."""

import re
import sys

import pytest
from textual.widgets import Digits, Input, ProgressBar, Static

from dflash_chat.commands import parse
from dflash_chat.conversation import Turn
from dflash_chat.draft_panel import ANSWERS
from dflash_chat.race_screen import RaceScreen
from dflash_chat.screens import RowsScreen
from dflash_chat.settings_screen import SettingsScreen
from dflash_chat.welcome import QUESTIONS
from dflash_mlx.client import DecodeConfig, DFlashError, RaceResult, RaceStep
from dflash_mlx.engine.pair import Capabilities, Preset
from support.app_scripts import ANSWER, WORDS, ScriptedBackend, in_chat, race_of, rounds_of
from support.configs import config_with


@in_chat()
async def test_a_command_says_what_to_do_or_holds_for_the_next_answer(chat, app, backend):
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
        ("/export", "there is nothing to export yet"),
        ("/delete", "there is nothing to delete yet"),
        ("/theme purple", "theme is 'purple'; choose one of dark, light"),
    ):
        await chat.say(line)
        assert sentence in chat.notices[-1]
    await chat.say("/method ngram")
    await chat.say("/temperature 0.7")
    assert chat.notices[-1] == "The temperature is 0.7."
    await chat.answered()
    config = backend.requests[0].config
    assert (config.method, config.sampling.temperature) == ("ngram", 0.7)
    assert "prompt lookup" in chat.text
    await chat.say("/temperature 5")
    assert app.config.sampling.temperature == 5 and "noise" in chat.notices[-1]
    await chat.say("/temperature 0")
    app.commands.set_config(config_with("d2sd", branches=3))
    await chat.say("/method dflash")
    assert "Branches is 3" in chat.notices[-1] and "/settings" in chat.notices[-1]
    assert app.config.method == "d2sd"


@in_chat(decode=DecodeConfig(method="d2sd", budget=8), size=(80, 24))
async def test_settings_show_every_option_and_apply_together(chat, app):
    await chat.say("/settings")
    screen = app.screen
    assert isinstance(screen, SettingsScreen)
    assert "Temperature" in chat.text and "max_tokens" not in chat.text, "at its top"
    texts = " ".join(str(s.render()) for s in screen.query(Static))
    usual = [field.placeholder for field in screen.query(Input)]
    assert [said for said in usual if ")" in said or len(said) > 70] == []
    assert "stop after this many tokens" in texts
    assert "choose from this many of the likeliest" in texts
    screen.query_one("#set-max_tokens", Input).value = "many"
    await chat.press("ctrl+s")
    wanted = "Longest answer is 'many'; choose a whole number"
    await chat.shows(wanted)
    screen.query_one("#set-max_tokens", Input).value = "7"
    screen.query_one("#set-top_p", Input).value = "3"
    await chat.press("ctrl+s")
    await chat.shows("(top-p) is 3.0")
    screen.query_one("#set-top_p", Input).value = "0.9"
    screen.query_one("#set-stop", Input).value = "END, ###"
    await chat.press("ctrl+s")
    await chat.pause()
    assert (app.config.max_tokens, app.config.sampling.top_p) == (7, 0.9)
    assert app.config.stop == ("END", "###")
    assert app.config.method == "d2sd"
    before = app.config
    await chat.say("/settings")
    app.screen.query_one("#set-max_tokens", Input).value = "9"
    await chat.press("escape")
    assert app.config is before, "left with escape they change nothing"
    await chat.say("/settings")
    await chat.press("ctrl+s")
    await chat.pause()
    assert app.config == before, "saving unchanged settings changes nothing either"


@in_chat(size=(100, 40))
async def test_help_figures_and_the_palette_of_all_commands_open_over_the_chat_and_close(chat, app):
    await chat.say("/help")
    assert isinstance(app.screen, RowsScreen)
    assert "/temperature [number]" in chat.text
    await chat.press("escape")
    await chat.answered()
    await chat.press("f3")
    await chat.pause()
    assert "not known, /race compares" in chat.text, "of so short an answer"
    assert "passes of the large model" in chat.text, "and what it means"
    await chat.press("f3")
    assert app.screen is app.base
    titles = [command.title for command in app.get_system_commands(app.screen)]
    assert "/race [question]" in titles
    assert "/rename title" in titles
    await chat.press("ctrl+p")
    await chat.press(*"theme")
    await chat.shows("light or dark")
    before = app.theme
    await chat.press("enter", "enter")
    await chat.until(lambda: app.theme != before)


@in_chat(size=(120, 40))
async def test_the_draft_view_opens_beside_what_is_typed_and_closes(chat, app):
    await chat.answered()
    app.prompt.text = "half a question"
    await chat.press("f2")
    await chat.shows("**here**")
    assert app.prompt.text == "half a question"
    assert "second draft" in chat.text
    assert "because 6" in chat.text
    assert "**:↵" in chat.text, "its tokens stand in place of its text"
    await chat.say("/draft")
    assert "second draft" not in chat.text
    assert "↵" not in chat.text


@in_chat(lambda: ScriptedBackend(["one **two**", "three **four**", "**five**"]), size=(120, 50))
async def test_every_answer_of_the_session_is_shown_as_its_tokens(chat, app):
    app.conversation.turns += [Turn("user", "before"), Turn("assistant", "of **another** day")]
    await app.transcript.show(app.conversation.turns)
    for question in ("a", "b"):
        await chat.answered(question)
    assert "**" not in chat.text
    await chat.press("f2")
    for text in ("one **two**", "three **four**", "of another day"):
        await chat.shows(text)
    await chat.say("/retry")
    await chat.until(lambda: "**five**" in chat.text and app.listener.job is None)
    assert "one **two**" in chat.text, "in a conversation that goes on elsewhere, too"
    for number in range(ANSWERS):
        app.draft.take(rounds_of("x")[0], WORDS)
        app.draft.end(f"answer {number}")
    assert app.draft.tokens_of("answer 0") and not app.draft.tokens_of("**five**"), "in little room"
    await chat.press("f2")
    await chat.until(lambda: "**" not in chat.text)


@in_chat(size=(120, 40))
async def test_the_draft_view_goes_back_through_the_rounds_and_stays_there(chat, app, backend):
    backend.hold(4)
    await chat.press("f2")
    assert "Ask something" in chat.text
    await chat.say("What meets?")
    await chat.reaches(4)
    await chat.shows("Round 4 of 4")
    app.draft.focus()
    await chat.press("left", "left")
    assert "Round 2 of 4" in chat.text
    backend.gate.release()
    await chat.shows("Round 2 of 5")
    await chat.press("home", "left")
    assert "Round 1 of 5" in chat.text
    await chat.press("end")
    assert "Round 5 of 5" in chat.text
    await chat.press("escape")
    assert app.focused is app.prompt
    assert app.listener.job is not None, "and nothing was stopped"
    await chat.goes_on()


@in_chat(size=(120, 40))
async def test_the_speed_is_large_where_there_is_room_and_every_figure_explains_itself(chat, app):
    await chat.answered()
    assert app.query_one("#speed-digits", Digits).value == "40.0"
    assert app.query_one("#ratio-digits", Digits).value == "", "too few tokens"
    assert not app.query_one("#speed").display, "what is large is not said twice"
    figures = ("#speed-digits", "#ratio-digits", "#beside", "#speed", "#rounds")
    assert all(app.query_one(name).tooltip for name in figures)
    await chat.resize_terminal(80, 24)
    await chat.until(lambda: app.query_one("#speed").display)
    assert "40.0 tok/s · " in chat.text and "x plain" not in chat.text
    assert re.search(r"speed .* up to 40.0 tok/s +accepted by position  1 .* 80%", chat.text)
    await chat.say("/new")
    assert "tok/s" not in chat.text


# The first screen


@in_chat(size=(80, 24))
async def test_an_empty_conversation_says_what_is_loaded_and_how_to_begin(chat, app, backend):
    for size in ((80, 24), (120, 40), (200, 60)):
        await chat.resize_terminal(*size)
        await chat.pause()
        shown = chat.text
        for text in ("SmolLM2-135M-Instruct", "DFlash + variable-prefix", *QUESTIONS):
            assert text in shown
        assert "tokens per second" not in shown, "there is no ground for a figure yet"
    await chat.answered(" 2 ")
    assert [m["content"] for m in backend.requests[0].messages] == [QUESTIONS[1]]
    assert QUESTIONS[0] not in chat.text
    await chat.answered("2")
    assert backend.requests[1].messages[-1]["content"] == "2", "a number is a number from now on"
    await chat.until(lambda: app.speeds.earlier("SmolLM2-135M-Instruct", "d2sd"))
    await chat.say("/new")
    await chat.shows("~40.0 tokens per second, ~2.0x plain")


@in_chat(size=(200, 60))
async def test_a_clicked_question_goes_into_the_line_and_answers_begin_at_the_top(chat, app):
    await chat.click(app.query(".sample").last())
    assert app.prompt.text == QUESTIONS[-1]
    assert app.focused is app.prompt
    await chat.answered("word " * 100)
    question = app.query(".question").first()
    assert question.region.y <= 3
    assert question.region.width <= 100
    left, right = question.region.x, 200 - question.region.right
    assert abs(left - right) <= 2, "in the middle"


@in_chat(size=(120, 40))
async def test_a_race_runs_on_the_last_question_and_can_be_stopped(chat, app, backend):
    await chat.answered("What meets?")
    backend.race_steps = [
        *race_of(ANSWER, 12),
        RaceResult("All 12 tokens are the same.", True, 2.0),
    ]
    await chat.press("f4")
    await chat.until(lambda: isinstance(app.screen, RaceScreen) and app.screen.over)
    assert "40.0 tok/s  12 tokens  0.3 s  done" in chat.text
    assert [side.border_title for side in app.screen.query(".faster")] == ["drafts: several a pass"]
    assert [m["content"] for m in backend.requests[-1].messages] == ["What meets?"]
    await chat.press("escape")
    await chat.answered("on")
    assert len(app.conversation.turns) == 4
    backend.hold(3)
    backend.race_steps = race_of(ANSWER, 12)
    await chat.say("/race What meets?")
    await chat.shows("2 tokens")
    with pytest.raises(DFlashError, match="a race is being run"):  # as the palette may
        await app.commands.run(parse("/race why"))
    await chat.press("ctrl+c")
    assert app.screen is app.base
    backend.gate.release(100)
    backend.race_steps = [DFlashError("the method is none", "choose another /method")]
    await chat.say("/race again")
    await chat.shows("choose another /method")
    assert "waiting" not in chat.text and not any(
        bar.display for bar in app.screen.query(ProgressBar)
    )
    await chat.press("escape")
    await chat.answered()


def bars(app):
    """How full the bar of each side of a race is."""
    return [bar.percentage for bar in app.screen.query(ProgressBar)]


async def raced(chat, app, result, steps=(), line="/race Why?"):
    """Run a race to its end: its subtitles, and whether its ratio is shown large."""
    chat.backend.race_steps = [*(steps or race_of(ANSWER, 12)), result]
    await chat.say(line)
    await chat.until(lambda: isinstance(app.screen, RaceScreen) and app.screen.over)
    times = app.screen.query_one("#times")
    said = [str(side.border_subtitle) for side in app.screen.query(".side")]
    shown = times.value if times.display else ""
    return said, shown


@in_chat(size=(120, 40))
async def test_a_race_ends_with_a_large_ratio_where_there_is_one(chat, app):
    same = "✓ same answer"
    for ratio, outcome in (
        (2.5, ([same, f"{same}, faster"], "2.5x")),
        (0.5, ([f"{same}, faster", same], "0.5x")),
        (0.0, ([same, same], "")),
    ):
        assert await raced(chat, app, RaceResult("Told.", True, ratio)) == outcome
        assert bars(app) == [1.0, 1.0]
        assert len(app.screen.query(".faster")) == bool(ratio)
        await chat.press("escape")
    outcome = await raced(chat, app, RaceResult("Told.", False, 2.5))
    assert outcome == (["", "faster"], "2.5x"), "not the same"


@in_chat(size=(120, 40))
async def test_where_two_answers_part_the_rest_of_both_is_marked(chat, app):
    steps = [RaceStep("plain", "Rhine and \x1bMain.", 5, 0.4, True)]
    steps += [RaceStep("drafted", "Rhine and Mosel.", 4, 0.2, True)]
    await raced(chat, app, RaceResult("Told.", False), steps)
    assert bars(app) == [1.0, 1.0], "both are done, though one has fewer tokens"
    shown = [side.words.content for side in app.screen.query(".side")]
    marked = [content.plain[content.spans[-1].start :] for content in shown]
    assert marked == ["Main.", "Mosel."]
    assert all("underline" in str(content.spans[-1].style) for content in shown)


@in_chat(size=(120, 40))
async def test_the_bars_of_a_race_fill_with_the_tokens_of_the_answer(chat, app, backend):
    await chat.answered("What meets?")
    tokens = app.status.figures["generated_tokens"]
    backend.hold(3)
    backend.race_steps = race_of(ANSWER, 12)
    await chat.press("f4")
    await chat.shows("2 tokens")
    await chat.until(lambda: bars(app) == [pytest.approx(n / tokens) for n in (1, 2)])
    backend.gate.release(100)
    await chat.until(lambda: bars(app) == [1.0, 1.0])
    await chat.press("escape")
    backend.hold(3)
    await chat.say("/race another question")
    most = app.config.max_tokens
    await chat.until(lambda: bars(app) == [pytest.approx(n / most) for n in (1, 2)])
    assert "1 token " in chat.text and "2 tokens " in chat.text
    await chat.press("escape")
    backend.gate.release(100)


@in_chat(lambda: ScriptedBackend(waits="load"))
async def test_what_is_printed_while_loading_is_shown_as_progress(chat, app, backend):
    assert "loading SmolLM2" in chat.text and "your question" not in chat.text
    await chat.say("Hello!")
    await chat.shows("loading SmolLM2-135M-Instruct; your question waits for it")
    app.read_output("\r unpacking:  45%|████      | 44.1M/98.4M")
    await chat.shows("unpacking; your question waits for it")
    assert "45%" in chat.text
    backend.held.set()
    await chat.until(lambda: app.listener.job is None and not app.listener.waiting)
    assert chat.shown_answer == ANSWER
    app.read_output("a warning from a library\n")
    await chat.pause()
    assert "unpacking" not in chat.text
    assert "warning" not in chat.text


@in_chat(lambda: ScriptedBackend(waits="measure"), decode=DecodeConfig())
async def test_timing_the_machine_shows_how_far_it_is_and_blocks_no_keys(chat, app, backend):
    await chat.until(lambda: app.pair and app.listener.waiting)
    sys.stderr.write("\rmeasuring this machine, once:  50%|████      | 6/12")
    await chat.shows("measuring this machine, once")
    assert "50%" in chat.text
    await chat.press("h", "i")
    assert app.prompt.text == "hi"
    await chat.press("enter")
    await chat.until(lambda: app.listener.job is not None)
    assert backend.requests == [], "it waits its turn"
    await chat.goes_on()
    assert "timing" not in chat.text
    assert chat.shown_answer == ANSWER


class Left(ScriptedBackend):
    """Its timing stops, as where another pair is loaded meanwhile."""

    def measure(self, again):
        yield 1


@in_chat(lambda: Left(), decode=DecodeConfig())
async def test_a_timing_that_stops_is_waited_for_no_longer(chat, app):
    await chat.until(lambda: app.pair and not app.listener.waiting)


class Compared(ScriptedBackend):
    """Drafters are compared after the timing, step by step."""

    def measure(self, again):
        yield from super().measure(again)
        yield from (None, None, "from the next start on X drafts")


@in_chat(lambda: Compared(), decode=DecodeConfig())
async def test_the_chat_says_which_drafter_was_found_the_fastest(chat):
    await chat.until(lambda: chat.notices)
    assert chat.notices == ["from the next start on X drafts."]


@in_chat(
    lambda: ScriptedBackend(capabilities=Capabilities(("dflash",) * 2, preset=Preset("ddtree"))),
    decode=DecodeConfig(),
)
async def test_the_method_says_what_auto_is_with_this_model(chat):
    assert "DFlash tree" in chat.text
    await chat.say("/method")
    assert chat.notices == ["The method is auto, which is ddtree with this model."]
    await chat.say("/method ngram")
    assert chat.notices[1:] == ["The method is ngram."]
    assert "prompt lookup" in chat.text
