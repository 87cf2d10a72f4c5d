"""Texts that try to command a terminal, and terminals that tell whether one has obeyed."""

from __future__ import annotations

import random
import re

import pyte

ESCAPES = """
    c 7 8 = > D E H M N O Z #8 (0 )0 *0 %G %@ ~ n o | } [2J [3J [H [10;10H [5;10r [4h [20h [?1h
    [?3h [?5h [?6h [?7l [?25l [?47h [?1000h [?1003h [?1006h [?1049h [?2004h [?2026h [>1u [<u [=1;1u
    [31;1m [7m [38;5;196m [0;8m [3g [6n [c [>c [5n [21t [8;50;100t [22;0t [100A [100B [100C [100D
    [100L [100M [100P [100@ [100X [!p [61"p [1"q [s [u [ ] P X ^ _
    ]0;owned@ ]2;owned! ]1;owned@ ]4;1;red@ ]10;red@ ]52;c;b3duZWQ=@ ]8;;http://x! ]9;owned@ ]104@
    ]1337;File=:AAAA@ Pq#0! P+q544e! Xx! ^x! _Gx!
"""  # behind ESC; @ and ! at the end stand for BEL and ST
SEQUENCES = (
    *("\x1b" + re.sub("@$", "\x07", re.sub("!$", "\x1b\\\\", piece)) for piece in ESCAPES.split()),
    *("\x9b2J", "\x9b?25l", "\x9b31m", "\x9d0;owned\x07", "\x9d2;owned\x9c", "\x90q\x9c", "\x98x"),
    *map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    *("\x1b\x1b[2J", "\x1b[\x1b[2J", "\x1b\x00[2J", "\x1b\r[2J", "\x1b[2\x9bJ", "\x1b\n[2J"),
)
WORDS = (
    *("the", "Rhine", "**bold**", "`code`", "\n", "\n\n", "- a\n", "# T\n", "| a | b |\n", "```\n"),
    *("[x](http://y)", "<b>", "[/b]", "[red]", "é", "漢字", "\U0001f600", "\u200d", "\xa0", "\t"),
    "a" * 60,
)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def hostile_text(seed: object) -> str:
    """Words and sequences in turn, some of them cut; the same for the same seed."""
    draw = random.Random(str(seed))
    parts = []
    for _ in range(draw.randint(1, 12)):
        sequence = draw.choice(SEQUENCES)
        cut = draw.randint(1, len(sequence)) if draw.random() < 0.2 else len(sequence)
        parts += [draw.choice(WORDS), sequence[:cut]]
    return "".join(parts)


def pieces(text: str, seed: object) -> list[str]:
    """`text` cut at random, as it streams."""
    draw = random.Random(str(seed))
    cuts = sorted(draw.randint(0, len(text)) for _ in range(4))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class Watched(pyte.Screen):
    """A terminal's screen that keeps what it was made to answer."""

    def __init__(self, columns: int = 100, lines: int = 30) -> None:
        self.answers: list[str] = []
        super().__init__(columns, lines)

    def write_process_input(self, data: str) -> None:
        self.answers.append(data)


def state(screen: pyte.Screen) -> dict[str, object]:
    """All that outlasts a text but the text itself and where the cursor is."""
    cursor = screen.cursor
    return {
        "modes": set(screen.mode),
        "margins": screen.margins,
        "charsets": (screen.charset, screen.g0_charset, screen.g1_charset),
        "titles": (screen.title, screen.icon_name),
        "tab stops": set(screen.tabstops),
        "saved": len(screen.savepoints),
        "cursor": (cursor.attrs, cursor.hidden),
        "size": (screen.columns, screen.lines),
        "answers": list(getattr(screen, "answers", [])),
    }


def commands_in(shown: str) -> list[str]:
    """What a terminal would obey in `shown`, colours that the program itself sets aside."""
    return CONTROL.findall(re.sub(r"\x1b\[[0-9;:]*m", "", shown))
