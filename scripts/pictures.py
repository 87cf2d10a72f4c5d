"""Take the pictures of the documentation: the chat on the default pair, with what it really does.

    .venv/bin/python scripts/pictures.py

Nothing is scripted but the keys: answers, speeds and trees are those of this machine on this day,
which the title of every picture says. The machine should be idle. It writes SVG files to docs/;
`chat.svg` moves, at the speed at which the answer came. Look at them before you keep them. The
letters are in the files, of a font of matplotlib's (extra plot), so that they look alike anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import html
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from io import BytesIO
from pathlib import Path

import matplotlib
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from textual.pilot import Pilot

import dflash_mlx  # before anything that imports mlx
from dflash_chat.backend import Backend
from dflash_chat.chat_app import ChatApp
from dflash_chat.options import ChatConfig
from dflash_chat.race_screen import RaceScreen
from dflash_chat.welcome import QUESTIONS

ROOT = Path(__file__).parent.parent
LARGE, SMALL = (110, 34), (80, 24)
FRAMES, HOLD = 9, 4.0  # of the moving picture while an answer streams; seconds of its last one
MOST = 900_000  # bytes of a picture
MOST_BUSY = 1.0  # load of the machine before; figures beside other work would say little
_BODY = re.compile(r"<svg[^>]*>(.*)</svg>", re.DOTALL)
_LETTERS = re.compile(r"<text[^>]*>([^<]+)</text>")
# Free to embed, in whole and in part: LICENSE_DEJAVU beside them.
FONTS = {"normal": "DejaVuSansMono.ttf", "bold": "DejaVuSansMono-Bold.ttf"}
_BOX = re.compile(r'viewBox="[^"]*"')


def picture(app: ChatApp, title: str = "dflash-chat") -> str:
    """The screen as SVG, without the fonts that it would fetch from elsewhere."""
    svg = app.export_screenshot(title=title)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)  # spaces of boxes and digits
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def moving(frames: list[tuple[float, str]], hold: float) -> str:
    """One SVG of several, endless. frames: seconds at which each begins, in order, and the SVG.

    hold: seconds of the last one, which stands still where nothing may move.
    """
    begins = [begin - frames[0][0] for begin, _ in frames]
    ends = [*begins[1:], begins[-1] + hold]
    rules, bodies = [], []
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        at, to = (100 * second / ends[-1] for second in (begin, end))
        hidden = "0%{visibility:hidden}" if at else ""
        after = f"{to:.2f}%{{visibility:hidden}}" if end < ends[-1] else ""
        rules.append(f"@keyframes f{i}{{{hidden}{at:.2f}%{{visibility:visible}}{after}}}")
        rules.append(f".f{i}{{animation:f{i} {ends[-1]:.2f}s step-end infinite}}")
        body = _BODY.search(frames[i][1])
        assert body is not None
        last = "" if i == len(frames) - 1 else ' visibility="hidden"'
        bodies.append(f'<g class="f{i}"{last}>{body[1]}</g>')
    box = _BOX.search(frames[0][1])
    assert box is not None
    still = "@media (prefers-reduced-motion: reduce){g{animation:none !important}}"
    style = f"<style>{''.join(rules)}{still}</style>"
    head = f'<svg xml:space="preserve" class="rich-terminal" {box[0]} xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, style, *bodies, "</svg>\n"])


def with_letters(svg: str) -> str:
    """The SVG with the letters that it shows, each of the two weights as a font of its own."""
    shown = html.unescape("".join(_LETTERS.findall(svg)))
    folder, rules = Path(matplotlib.get_data_path()) / "fonts" / "ttf", []
    for weight, file in FONTS.items():
        font, kept = TTFont(folder / file), BytesIO()
        del font["FFTM"]  # of its editor
        cut = Subsetter(Options(hinting=False, layout_features=[]))
        cut.populate(text=shown)
        cut.subset(font)
        font.flavor = "woff"
        font.save(kept)
        data = base64.b64encode(kept.getvalue()).decode()
        source = f"src:url(data:font/woff;base64,{data})"
        rules.append(f"@font-face{{font-family:screen;font-weight:{weight};{source}}}")
    svg = re.sub(
        r"font-family: ?(Fira Code, monospace|arial)", "font-family: screen, monospace", svg
    )
    return svg.replace("<style>", f"<style>{''.join(rules)}", 1)


@dataclass
class Camera:
    """Takes pictures of a running chat. title: above each. frames: of the moving picture."""

    app: ChatApp
    pilot: Pilot[None]
    folder: Path
    title: str
    frames: list[tuple[float, str]] = field(default_factory=list)

    def take(self, name: str) -> None:
        """Keep what is on screen under a name."""
        self.write(name, picture(self.app, self.title))

    def write(self, name: str, svg: str) -> None:
        """Keep an SVG; SystemExit where it is too large to be shown on a page."""
        file, svg = self.folder / f"{name}.svg", with_letters(svg)
        if len(svg.encode()) > MOST:
            raise SystemExit(f"{file} would have {len(svg.encode())} bytes; take fewer frames")
        file.write_text(svg, encoding="utf-8")
        print(f"{file}: {len(svg.encode()) // 1000} kB")

    def film(self) -> None:
        """Keep what is on screen as the next frame."""
        self.frames.append((time.perf_counter(), picture(self.app, self.title)))

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the chat run until something holds."""
        while not condition():
            await self.pilot.pause(0.02)
        await self.pilot.pause(0.1)

    async def say(self, text: str) -> None:
        """Type a line and send it."""
        self.app.prompt.put(text)
        await self.pilot.pause(0.1)
        await self.pilot.press("enter")
        await self.pilot.pause(0.1)

    async def answered(self, text: str) -> None:
        """Ask, and wait for the whole answer."""
        await self.say(text)
        await self.until(lambda: self.app.listener.job is None)


def title() -> str:
    """When and on what the pictures were taken."""
    day = date.today()
    return f"dflash-chat on {os.cpu_count()} CPU cores, {day.day} {day:%B %Y}"


async def shoot(folder: Path, tokens: int) -> None:
    """All pictures, one chat after the other."""
    with tempfile.TemporaryDirectory() as talks:
        chat = ChatConfig(conversations=Path(talks))
        decode = dflash_mlx.DecodeConfig(max_tokens=tokens)
        app = ChatApp(dflash_mlx.PairConfig(), decode, chat, Backend())
        async with app.run_test(size=LARGE) as pilot:
            camera = Camera(app, pilot, folder, title())
            app.prompt.cursor_blink = False
            await camera.until(lambda: app.pair and not app.listener.waiting)
            for question in QUESTIONS:  # the first screen has something to say then
                await camera.answered(question)
                await camera.say("/new")
            await session(camera, tokens)
            await small(camera)


async def session(camera: Camera, tokens: int) -> None:
    """The first screen, an answer as it comes, where its tokens came from, and a race."""
    app, pilot = camera.app, camera.pilot
    await camera.until(lambda: app.transcript.welcome.told)
    camera.take("chat-welcome")
    camera.film()
    await pilot.pause(1.5)
    app.prompt.put(QUESTIONS[0])
    await pilot.pause(0.1)
    camera.film()
    await pilot.pause(1.0)
    await pilot.press("enter")
    for part in range(1, FRAMES):
        await camera.until(lambda n=part: enough(app, tokens * n // FRAMES))
        camera.film()
        if part == FRAMES * 2 // 3:
            camera.take("chat-streaming")
    await camera.until(lambda: app.listener.job is None)
    camera.film()
    camera.write("chat", moving(camera.frames, HOLD))
    await pilot.press("f2")
    await pilot.pause(0.5)
    app.draft.focus()
    for _ in range(200):  # back to a round that shows branches of both kinds
        if (shown := app.draft.shown) and 1 < len(shown.accepted.path) < len(shown.accepted.tree):
            parents = shown.accepted.tree.parents
            if len(set(parents)) < len(parents):
                break
        await pilot.press("left")
    await pilot.pause(0.5)
    camera.take("chat-draft-view")
    app.prompt.focus()
    await pilot.press("f2", "f3")
    await pilot.pause(0.5)
    camera.take("chat-figures")
    await pilot.press("escape")
    await camera.say("/race")
    await camera.until(lambda: isinstance(app.screen, RaceScreen) and app.screen.over)
    camera.take("chat-race")
    await pilot.press("escape")


def enough(app: ChatApp, tokens: int) -> bool:
    """Whether the answer has so many tokens, or ends before."""
    figures = app.status.figures
    return app.listener.job is None or (
        figures is not None and figures["generated_tokens"] >= tokens
    )


async def small(camera: Camera) -> None:
    """A small terminal with light colours."""
    await camera.say("/theme")
    await camera.pilot.resize_terminal(*SMALL)
    await camera.pilot.pause(0.5)
    camera.take("chat-80x24")


def main() -> None:
    """Take all of them."""
    parser = argparse.ArgumentParser(description="Take the pictures of the documentation.")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--tokens", type=int, default=110, help="of an answer (default: 110)")
    parser.add_argument("--anyway", action="store_true", help="also on a busy machine")
    arguments = parser.parse_args()
    busy = os.getloadavg()[0]
    if busy > MOST_BUSY and not arguments.anyway:
        raise SystemExit(f"the machine is busy (load {busy:.1f}); wait, or give --anyway")
    asyncio.run(shoot(arguments.folder, arguments.tokens))


if __name__ == "__main__":
    main()
