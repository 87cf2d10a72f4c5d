"""Answers as the chat draws them: every character is there, whatever it looks like."""

import random
import re

from dflash_chat.markdown import markdown_parser
from dflash_mlx.client import for_terminal, split_thinking
from support.app_scripts import ScriptedBackend, in_chat
from support.hostile import hostile_text

FRAMES = re.compile("[\\s\u2500-\u259f•🖼]+")
# What a model writes, and what of it is to be read.
INLINE = {
    "Vec<T{n}>": "Vec<T{n}>",
    'x <div class="c{n}"> y': 'x<divclass="c{n}">y',
    "<placeholder{n}>": "<placeholder{n}>",
    "</p{n}>": "</p{n}>",
    "a <!-- said {n} --> b": "a<!--said{n}-->b",
    "<?php echo {n} ?>": "<?phpecho{n}?>",
    "<![CDATA[ d{n} ]]>": "<![CDATA[d{n}]]>",
    "List<Map<K, V{n}>>": "List<Map<K,V{n}>>",
    "&lt;i{n}&gt;": "<i{n}>",
    "**bold{n}**": "bold{n}",
    "`<code{n}>`": "<code{n}>",
    "![alt{n}](http://i)": "alt{n}",
    "[label<U{n}>](http://u)": "label<U{n}>",
    "[see{n}][r]": "[see{n}][r]",
    "[^{n}] $x_{n}$ [ ] [/b{n}]": "[^{n}]$x_{n}$[][/b{n}]",
}
BLOCKS = {
    "<div>\nhtml line {n}\n</div>": "<div>htmlline{n}</div>",
    "[r]: http://r.{n} 'title {n}'": "[r]:http://r.{n}'title{n}'",
    "[^{n}]: a note": "[^{n}]:anote",
    "| a | b |\n|---|---|\n| 1 | c<{n}> |": "ab1c<{n}>",
    "| a |\n|---|\n| 1 | lost{n} | too |": "|a||---||1|lost{n}|too|",
    "| a |\n|---|\n|| lost{n} |": "|a||---|||lost{n}|",
    "| a |\n|---|\n|||| lost{n}": "|a||---|||||lost{n}",
    "```\n<pre{n}>\n```": "<pre{n}>",
    "```src/file{n}.py\nx<y>\n```": "src/file{n}.pyx<y>",
    "```python title {n}\nx<y>\n```": "pythontitle{n}x<y>",
    "    <indented{n}>": "<indented{n}>",
    "- <li{n}>\n- [x] done": "<li{n}>[x]done",
    "> <q{n}>": "<q{n}>",
    "# <h{n}>": "<h{n}>",
    "<script>\n\nalert({n})\n\n</script>": "<script>alert({n})</script>",
}


def made(seed):
    """An answer, and what of it is to be read, in order."""
    draw = random.Random(seed)
    parts = []
    for n in range(draw.randint(1, 8)):
        inline = [draw.choice([*INLINE.items()]) for _ in range(draw.randint(1, 4))]
        text, shown = draw.choice(
            [(" ".join(t for t, _ in inline), "".join(s for _, s in inline)), *BLOCKS.items()]
        )
        parts.append([piece.replace("{n}", f"{seed}n{n}") for piece in (text, shown)])
    return "\n\n".join(t for t, _ in parts), [s for _, s in parts]


def drawn(answer):
    """All that the parser gives the screen to draw."""
    tokens = markdown_parser().parse(answer)
    leaves = [leaf for token in tokens for leaf in token.children or [token]]
    return FRAMES.sub("", "".join(leaf.content for leaf in leaves))


def test_every_character_of_a_thousand_hostile_answers_is_given_to_the_screen():
    for seed in range(1000):
        answer, texts = made(seed)
        shown = drawn(answer)
        at = 0
        for text in texts:
            assert (at := shown.find(text, at)) >= 0, answer
            at += len(text)
        answer = split_thinking(for_terminal(hostile_text(seed))).answer
        words = re.findall(r"[^\W_]+", answer.replace("](http://y)", "]"))
        shown = drawn(answer)
        assert all(word in shown for word in words), answer


@in_chat(lambda: ScriptedBackend([made(seed)[0] for seed in range(4)]), size=(100, 130))
async def test_what_is_given_to_the_screen_is_on_it(chat):
    for seed in range(4):
        await chat.answered()
        screen = FRAMES.sub("", chat.text)
        assert all(text in screen for text in made(seed)[1]), made(seed)[0]


@in_chat(lambda: ScriptedBackend(["Use Vec<T> or <div class='x'> here.\n\n<div>\nblock\n</div>"]))
async def test_tags_and_generics_of_an_answer_are_shown_as_it_streams(chat):
    await chat.answered()
    assert "Use Vec<T> or <div class='x'> here." in chat.text
    assert "<div> block </div>" in chat.text
