"""Drawing how tokens came to be: the tinted answer and a round's tree, as styled text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from dflash_chat.naming import TARGET
from dflash_mlx.client import Delta, source_of

ACCEPTED, REJECTED, LINES = "accepted", "rejected", "lines"
YES, NO = "✓", "✗"
END, SPECIAL = "∎", "◇"  # of the answer; any other token that is no text
BOUNDARY = "▏"  # between tokens of one word
_BLANKS = {"\n": "↵\n", "\t": "⇥   ", "\r": ""}
_SPECIAL = re.compile(r"<\|[^|<>]*\|>|</?s>|<(?:pad|unk|bos|eos|start_of_turn|end_of_turn)>")

Segment = tuple[str, str]  # text, and what it is: one of the names above or a token's source
Line = list[Segment]


@dataclass(frozen=True)
class DrawnTree:
    """One round's tree in texts. parents: node ids, -1 for the root. path: accepted nodes.

    next_text: the target's own token behind the path. origins: where each node's token came from.
    """

    texts: tuple[str, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    next_text: str
    origins: tuple[str, ...] = ()

    @classmethod
    def of(cls, delta: Delta, text_of: Callable[[int], str]) -> DrawnTree:
        """The tree of a round. text_of: a token alone as text."""
        accepted, tree = delta.accepted, delta.accepted.tree
        texts = tuple(map(text_of, (delta.anchor, *tree.drafted)))
        origins = tuple(source_of(tree, node, delta.statistics.method) for node in range(len(tree)))
        return cls(texts, tree.parents, accepted.path, text_of(accepted.tokens[-1]), origins)

    def origin(self, node: int) -> str:
        """Where the token of a node came from; the root was the target's choice."""
        return self.origins[node] if node and self.origins else TARGET


def sources(delta: Delta) -> Iterator[tuple[int, str]]:
    """The tokens of a round, each with the drafter that it came from, or the target."""
    path, tree, method = delta.accepted.path, delta.accepted.tree, delta.statistics.method
    for i, token in enumerate(delta.tokens, start=1):
        yield token, source_of(tree, path[i], method) if i < len(path) else TARGET


def symbol(text: str, ends: bool) -> str | None:
    """The sign for a token that is no text, None for any other. ends: whether it ends answers."""
    if ends:
        return END
    return SPECIAL if _SPECIAL.fullmatch(text) else None


def visible(text: str) -> str:
    """A token's text on one line: spaces and line breaks as signs."""
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    return "".join(c if c.isprintable() else "�" for c in shown) or "∅"


def tint(pieces: Sequence[Segment]) -> Line:
    """Tokens of an answer with their sources, as the answer reads.

    Where two tokens meet inside a word, a thin line stands between them; spaces have no colour, so
    that other boundaries show as well.
    """
    line: Line = []
    joined = False  # whether a token that is not over yet touches the next
    for text, source in pieces:
        if not text:
            continue
        if joined and not text[0].isspace():
            line.append((BOUNDARY, LINES))
        for part in re.findall(r"\s+|\S+", text):
            line.append((_blank(part), LINES) if part.isspace() else (visible(part), source))
        joined = not text[-1].isspace()
    return line


def _blank(text: str) -> str:
    """White space as it lays out, with a sign where a line or a column ends, and nothing odd."""
    return "".join(_BLANKS.get(c, " ") for c in text)


def draw(tree: DrawnTree, most_lines: int, width: int = 1000) -> list[Line]:
    """The tree, a line per branch, accepted branches first; then the target's own token.

    Every drafted token has a tick or a cross before it, so nothing is told by colour alone. Lines
    that would be wider than `width` are continued below.
    """
    root: Line = [(visible(tree.texts[0]), TARGET)]
    lines = [part for line in _branches(tree, 0, root, "", width) for part in _folded(line, width)]
    hidden = len(lines) + 1 - most_lines
    if hidden > 0:
        lines = [*lines[: most_lines - 2], [(f"… {hidden + 1} more lines", LINES)]]
    return [*lines, [("then ", LINES), (visible(tree.next_text), TARGET)]]


def _branches(tree: DrawnTree, node: int, line: Line, indent: str, width: int) -> list[Line]:
    """Lines of the subtree of `node`, whose own label ends `line` already.

    Tokens that may follow stand under the token that they follow; far to the right, that one begins
    a line of its own.
    """
    lines, under, children = [], indent, _children(tree, node)
    while len(children) == 1:
        label, line = _label(tree, children[0]), [*line, ("─", LINES)]
        children = _children(tree, children[0])
        if len(children) > 1 and _cells(line) > width // 2:
            lines.append(line[:-1])
            line = [(indent + "  ─", LINES)]
        under = indent.ljust(_cells(line))
        line = [*line, *label]
    lines.append(line)
    for child in children:
        last = child == children[-1]
        start: Line = [(under + ("└─" if last else "├─"), LINES), *_label(tree, child)]
        lines += _branches(tree, child, start, under + ("  " if last else "│ "), width)
    return lines


def _cells(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def _folded(line: Line, width: int) -> Iterator[Line]:
    """A line in parts that fit `width`, broken before the strokes between its tokens."""
    part: Line = []
    for i, (text, kind) in enumerate(line):
        token = line[i + 1 : i + 3] if text == "─" else ()
        wide = _cells([*part, (text, kind), *token])
        if part and text == "─" and wide > width:
            yield part
            part = [("  ", LINES)]
        part.append((text, kind))
    yield part


def _children(tree: DrawnTree, node: int) -> list[int]:
    found = [i for i, parent in enumerate(tree.parents) if parent == node]
    return sorted(found, key=lambda child: child not in tree.path)


def _label(tree: DrawnTree, node: int) -> Line:
    text, origin = visible(tree.texts[node]), tree.origin(node)
    mark = (YES, ACCEPTED) if node in tree.path else (NO, REJECTED)
    return [mark, (text, origin)]
