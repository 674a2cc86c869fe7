"""The least tokens of a language, by unrolling all it counts and trying every token in every state: slow and plain.

Nothing of the engine is used. A language is a tree of bytes sets, sequences, alternatives and repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tree:
    kind: str
    """set, seq, alt, times."""
    parts: tuple[Tree, ...] = ()
    chars: bytes = b""
    least: int = 0
    most: int | None = None


def text(data: bytes) -> Tree:
    return Tree("seq", tuple(Tree("set", chars=bytes([byte])) for byte in data))


def seq(*parts: Tree) -> Tree:
    return Tree("seq", parts)


def alt(*parts: Tree) -> Tree:
    return Tree("alt", parts)


def times(body: Tree, least: int, most: int | None) -> Tree:
    return Tree("times", (body,), least=least, most=most)


@dataclass
class Automaton:
    """States are numbers; `moves[s]` are (bytes, next), `free[s]` next states without a byte."""

    moves: list[list[tuple[bytes, int]]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)

    def state(self) -> int:
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def build(self, tree: Tree, begin: int) -> int:
        """The state behind `tree`, begun in `begin`."""
        if tree.kind == "set":
            end = self.state()
            self.moves[begin].append((tree.chars, end))
            return end
        if tree.kind == "seq":
            for part in tree.parts:
                begin = self.build(part, begin)
            return begin
        if tree.kind == "alt":
            end = self.state()
            for part in tree.parts:
                start = self.state()
                self.free[begin].append(start)
                self.free[self.build(part, start)].append(end)
            return end
        for _ in range(tree.least):
            begin = self.build(tree.parts[0], begin)
        end = self.state()
        self.free[begin].append(end)
        if tree.most is None:
            again = self.state()
            self.free[begin].append(again)
            self.free[self.build(tree.parts[0], again)] += [again, end]
        for _ in range(tree.least, tree.most or 0):
            begin = self.build(tree.parts[0], begin)
            self.free[begin].append(end)
        return end

    def closed(self, states: set[int]) -> set[int]:
        todo, seen = list(states), set(states)
        while todo:
            for following in self.free[todo.pop()]:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return seen


def accepts(tree: Tree, data: bytes) -> bool:
    automaton = Automaton()
    begin = automaton.state()
    end = automaton.build(tree, begin)
    states = automaton.closed({begin})
    for byte in data:
        states = automaton.closed({there for here in states for chars, there in automaton.moves[here] if byte in chars})
    return end in states


def least_tokens(tree: Tree, tokens: Sequence[bytes]) -> int:
    """The fewest of `tokens` whose text is in the language."""
    automaton = Automaton()
    begin = automaton.state()
    end = automaton.build(tree, begin)
    heads: dict[bytes, bool] = {data[:size]: True for data in tokens for size in range(1, len(data))}
    whole = dict.fromkeys(tokens)
    reached = automaton.closed({begin})
    frontier, count = reached, 0
    while end not in reached:
        found: set[int] = set()
        todo = [(b"", state) for state in frontier]
        seen = set(todo)
        while todo:
            said, state = todo.pop()
            for chars, following in automaton.moves[state]:
                for byte in chars:
                    data = said + bytes([byte])
                    if data in whole:
                        found.add(following)
                    if data in heads:
                        for place in automaton.closed({following}):
                            if (data, place) not in seen:
                                seen.add((data, place))
                                todo.append((data, place))
        frontier = automaton.closed(found) - reached
        assert frontier, "the language is empty"
        reached |= frontier
        count += 1
    return count
