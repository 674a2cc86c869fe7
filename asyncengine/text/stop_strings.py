"""Stop strings in streamed text."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence


class StopAutomaton:
    """Finds the first of several strings in a text read character by character (Aho and Corasick 1975).

    Immutable: the samples of a request, on any thread, share one. Memory is about 16 bytes per character of all stop
    strings: a state's usual successor is the next state, so only branches of the trie need a table entry.
    """

    __slots__ = ("_branches", "_chars", "depth", "failures", "first", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._branches: dict[tuple[int, str], int] = {}
        self.depth = array("i", [0])
        """Length of the longest suffix of the text that is a prefix of a stop string, by state."""
        self.match = array("i", [0])
        """Length of the longest stop string that ends in a state; 0 if none does."""
        chars = [""]
        parents = self._build_trie(stops, chars)
        self._chars = chars
        """The character that leads from a state to the next one; "" where none does."""
        self._build_failures(parents)
        self.first = re.compile("[" + re.escape("".join(sorted({s[0] for s in stops}))) + "]" if stops else "(?!)")
        """Matches the characters that stop strings begin with; all others leave the initial state as it is."""

    def _build_trie(self, stops: Sequence[str], chars: list[str]) -> list[tuple[int, str]]:
        """Insert the strings; returns each state's parent and the character that leads there."""
        parents = [(0, "")]
        for stop in stops:
            state = 0
            for depth, char in enumerate(stop, 1):
                child = state + 1 if chars[state] == char else self._branches.get((state, char))
                if child is None:
                    child = len(parents)
                    parents.append((state, char))
                    chars.append("")
                    self.depth.append(depth)
                    self.match.append(0)
                    if child == state + 1:
                        chars[state] = char
                    else:
                        self._branches[state, char] = child
                state = child
            self.match[state] = len(stop)
        return parents

    def _build_failures(self, parents: list[tuple[int, str]]) -> None:
        """Find each state's longest proper suffix that is a state too, shallow states first."""
        self.failures = fail = array("i", bytes(4 * len(parents)))
        for state in sorted(range(1, len(parents)), key=self.depth.__getitem__):
            parent, char = parents[state]
            if parent:
                fail[state] = self.step(fail[parent], char)
            self.match[state] = self.match[state] or self.match[fail[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character. Linear in the text overall: each failure undoes an earlier success."""
        chars, branches, fail = self._chars, self._branches, self.failures
        while True:
            if chars[state] == char:
                return state + 1
            child = branches.get((state, char)) if branches else None
            if child is not None:
                return child
            if not state:
                return 0
            state = fail[state]


class StopStringMatcher:
    """Cuts one output's text at the first stop string, however it is spread over tokens and chunks.

    The text ends at the first moment it contains a stop string: the match that *ends* earliest wins, and of those that
    end at the same character the one that starts earliest (the longest). So the outcome depends on the text alone, not
    on how it was chunked, and never needs text beyond the match (the match that starts earliest overall would: "abcd"
    and "bc" in "abc" could only be told apart by generating on).

    Held back is only the longest suffix that may still become a stop string.
    """

    __slots__ = ("_automaton", "_include", "_state", "held", "matched")

    def __init__(self, stops: Sequence[str] | StopAutomaton, include_stop: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include = include_stop
        self._state = 0
        self.held = ""
        """Text held back."""
        self.matched: str | None = None
        """The stop string found, once there is one."""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string if there is a match (then all later text is dropped).

        With `armed=False` (tokens up to `min_tokens`) the text takes part in no match, not even as its beginning.
        """
        if self.matched is not None:
            return "", self.matched
        if not armed:
            return self.finish() + text, None
        automaton, state = self._automaton, self._state
        text = self.held + text
        at = len(self.held)
        while at < len(text):
            if not state:
                begin = automaton.first.search(text, at)
                if begin is None:
                    break
                at = begin.start()
            state = automaton.step(state, text[at])
            at += 1
            if length := automaton.match[state]:
                self.matched = text[at - length : at]
                self.held = ""
                return text[: at if self._include else at - length], self.matched
        self._state = state
        shown = len(text) - automaton.depth[state]
        self.held = text[shown:]
        return text[:shown], None

    def finish(self) -> str:
        """The text held back, at the end of the output; "" after a match."""
        held, self.held, self._state = self.held, "", 0
        return held
