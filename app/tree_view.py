"""Drawing how tokens came to be: the tinted answer and the last round's tree, as styled text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dflash_chat.naming import TARGET
from dflash_mlx import TextDelta, find_method

ACCEPTED, REJECTED, LINES = "accepted", "rejected", "lines"

Segment = tuple[str, str]  # text, and what it is: one of the names above or a token's source
Line = list[Segment]


@dataclass(frozen=True)
class DrawnTree:
    """One round's tree in texts. parents: node ids, -1 for the root. path: accepted nodes.

    next_text: the target's own token behind the path. reason: why the tree is as it is, if
    something chose it.
    """

    texts: tuple[str, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    next_text: str
    reason: str = ""

    @classmethod
    def of(cls, delta: TextDelta, text_of: Callable[[int], str]) -> DrawnTree:
        """The tree of a round. text_of: a token alone as text."""
        accepted, tree = delta.accepted, delta.accepted.tree
        reason = delta.proposal.reason
        texts = tuple(map(text_of, (delta.anchor, *tree.drafted)))
        return cls(texts, tree.parents, accepted.path, text_of(accepted.tokens[-1]), reason)


def sources(delta: TextDelta) -> Iterator[tuple[int, str]]:
    """The tokens of a round, each with the drafter that it came from, or the target."""
    path, known = delta.accepted.path, delta.accepted.tree.sources
    usual = find_method(delta.statistics.method).sources
    for i, token in enumerate(delta.tokens, start=1):
        drafted = known[path[i]] if known and i < len(path) else usual[0].name if usual else ""
        yield token, drafted if i < len(path) else TARGET


def visible(text: str) -> str:
    """A token's text on one line: spaces and line breaks as signs."""
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    return "".join(c if c.isprintable() else "�" for c in shown) or "∅"


def tint(pieces: Sequence[Segment]) -> Line:
    """Tokens with their sources; neighbours of one source are one segment."""
    line: Line = []
    for text, source in pieces:
        if line and line[-1][1] == source:
            line[-1] = (line[-1][0] + text, source)
        else:
            line.append((text, source))
    return line


def draw(tree: DrawnTree, most_lines: int) -> list[Line]:
    """The tree, a line per branch, accepted branches first; then the target's own token.

    A rejected token has a cross before it, so nothing is told by colour alone.
    """
    lines = _branches(tree, 0, [(visible(tree.texts[0]), ACCEPTED)], "")
    hidden = len(lines) + 1 - most_lines
    if hidden > 0:
        lines = [*lines[: most_lines - 2], [(f"… {hidden + 1} more branches", LINES)]]
    return [*lines, [("target: ", LINES), (visible(tree.next_text), TARGET)]]


def _branches(tree: DrawnTree, node: int, line: Line, indent: str) -> list[Line]:
    """Lines of the subtree of `node`, whose own label ends `line` already."""
    children = _children(tree, node)
    while len(children) == 1:
        line = [*line, ("─", LINES), *_label(tree, children[0])]
        children = _children(tree, children[0])
    lines = [line]
    for child in children:
        last = child == children[-1]
        start: Line = [(indent + ("└─" if last else "├─"), LINES), *_label(tree, child)]
        lines += _branches(tree, child, start, indent + ("  " if last else "│ "))
    return lines


def _children(tree: DrawnTree, node: int) -> list[int]:
    """Children of `node`, the accepted one first."""
    found = [i for i, parent in enumerate(tree.parents) if parent == node]
    return sorted(found, key=lambda child: child not in tree.path)


def _label(tree: DrawnTree, node: int) -> Line:
    text = visible(tree.texts[node])
    if node in tree.path:
        return [(text, ACCEPTED)]
    first_rejected = tree.parents[node] in tree.path
    return [("✗" + text if first_rejected else text, REJECTED)]
