"""The shapes that may come next behind a part of a shape, wherever this one stands in an output."""

from __future__ import annotations

from typing import Any

from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Words

FramePath = tuple[nodes.Shape, Any, "FramePath"] | None
"""A frame (`tracker.Frame`): its shape, its index, the path of the frame around it. None: around the first shape."""


class Continuations:
    """The shapes that may come next at an index of a shape, each with the path of the frame behind it."""

    __slots__ = ("ends", "others", "steps", "texts")

    def __init__(self, shape: nodes.Shape, index: Any, most: int) -> None:
        """Raises `Unmodelled` for more than `most` steps from shape to shape: some rule begins with itself."""
        self.texts: dict[int, list[tuple[nodes.Literal, FramePath]]] = {}
        """Texts by their first byte."""
        self.others: list[tuple[nodes.Shape, FramePath]] = []
        self.ends = False
        """The shape may end here."""
        todo = following(shape, index, None)
        seen = dict.fromkeys(todo)
        for item, path in todo:  # grows while it is walked
            steps: list[tuple[nodes.Shape | None, FramePath]] = []
            if isinstance(item, nodes.Literal):
                self.texts.setdefault(item.data[0], []).append((item, path))
            elif isinstance(item, (nodes.Letters, nodes.Mark, Words)):
                self.others.append((item, path))
                if isinstance(item, Words) and b"" in item.words[:1]:
                    steps = [(None, path)]
            elif item is not None:
                steps = following(item, -1 if isinstance(item, (nodes.Chain, nodes.Lexeme)) else 0, path)
            elif path is not None:
                steps = following(*path)
            else:
                self.ends = True
            for step in steps:
                if step not in seen:
                    seen[step] = None
                    todo.append(step)
            if len(todo) > most:
                raise nodes.Unmodelled
        self.steps = len(todo)


def following(shape: nodes.Shape, index: int, outer: FramePath) -> list[tuple[nodes.Shape | None, FramePath]]:
    """Shapes that follow an index of a shape, each with the path behind it; those that a shape begins with follow its
    first index. None: what is around it goes on."""
    if isinstance(shape, nodes.Chain):
        at, size = index + 1, len(shape.items)
        if at >= size:
            return [(None, outer)]
        return [(shape.items[at], outer if at + 1 == size else (shape, at, outer))]
    if isinstance(shape, nodes.Lexeme):
        return [(None, outer) if index == 0 else (shape.body, (shape, 0, outer))]
    if isinstance(shape, nodes.Either):
        return [(item, outer) for item in shape.items]
    if isinstance(shape, nodes.Unordered):
        members = [(item, (shape, said, outer)) for item, said in shape.following(index)]
        return [*members, (None, outer)] if index and not shape.left(index) else [*members]
    assert isinstance(shape, nodes.Times)
    found: list[tuple[nodes.Shape | None, FramePath]] = [(None, outer)] if index >= shape.least else []
    if shape.most is None or index < shape.most:
        counted = index + 1 if shape.most is not None else min(index + 1, shape.least)
        found.append((shape.body, (shape, counted, outer)))
    return found
