"""Chat instructions: templates of `chat.json` with their slots filled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

FILE = Path(__file__).with_name("chat.json")
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class ChatTemplates:
    """templates: texts with slots like {topic}. slots: what may stand there, by name."""

    templates: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, file: Path = FILE) -> ChatTemplates:
        """What `file` says; a slot is a list, or {"from", "to"} for whole numbers."""
        contents = json.loads(file.read_text(encoding="utf-8"))
        slots = {
            name: tuple(map(str, range(options["from"], options["to"] + 1)))
            if isinstance(options, dict)
            else tuple(options)
            for name, options in contents["slots"].items()
        }
        return cls(tuple(contents["templates"]), slots)

    def prompt(self, random: Random) -> str:
        """One template, filled; a slot that comes several times is filled differently each time.

        What fills a slot that the template begins with gets a capital letter.
        """
        template = random.choice(self.templates)
        names = SLOT.findall(template)
        chosen = {
            name: random.sample(self.slots[name], names.count(name))
            for name in dict.fromkeys(names)
        }
        text = SLOT.sub(lambda slot: chosen[slot[1]].pop(), template)
        return text[:1].upper() + text[1:] if SLOT.match(template) else text
