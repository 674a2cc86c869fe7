"""Stop strings against a brute-force reading of the documented rule."""

from __future__ import annotations

import random
import time

import pytest

from asyncengine.text.stop_strings import StopAutomaton, StopStringMatcher


def reference(text: str, stops: list[str], armed_from: int = 0) -> tuple[str, str | None]:
    """Text before the match that ends first (the longest of those), and that match."""
    for end in range(armed_from, len(text) + 1):
        found = [s for s in stops if end - len(s) >= armed_from and text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def may_become(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that begins a stop string."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("alphabet", ["ab", "abc", "aé👍\n"])
def test_random_texts_match_brute_force(alphabet: str) -> None:
    rng = random.Random(1)
    matches = 0
    for _ in range(4000):
        stops = ["".join(rng.choices(alphabet, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5))]
        text = "".join(rng.choices(alphabet, k=rng.randrange(0, 25)))
        expected, stop = reference(text, stops)
        matches += stop is not None
        for include in (False, True):
            matcher = StopStringMatcher(tuple(stops), include)
            shown = seen = ""
            found: str | None = None
            for chunk in split(text, rng):
                seen += chunk
                emitted, found = matcher.push(chunk)
                shown += emitted
                if found is not None:
                    break
                assert len(seen) - len(shown) == may_become(seen, stops), (stops, seen, shown)
            assert (found, matcher.matched) == (stop, stop), (stops, text)
            assert shown + matcher.finish() == expected + (stop or "" if include else ""), (stops, text)
    assert 1000 < matches < 4000


def test_unarmed_text_takes_no_part_in_a_match() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 4))) for _ in range(2)]
        text = "".join(rng.choices("ab", k=12))
        border = rng.randrange(13)
        matcher = StopStringMatcher(stops)
        shown = "".join(matcher.push(char, armed=False)[0] for char in text[:border])
        assert shown == text[:border], "unarmed text is shown at once"
        for chunk in split(text[border:], rng):
            shown += matcher.push(chunk)[0]
        expected, stop = reference(text, stops, border)
        assert (shown + matcher.finish(), matcher.matched) == (expected, stop)


def test_unarmed_text_ends_a_match_in_progress() -> None:
    matcher = StopStringMatcher(("END",))
    assert [matcher.push("E"), matcher.push("N", armed=False), matcher.push("D")] == [
        ("", None),
        ("EN", None),
        ("D", None),
    ]


def test_text_after_the_match_is_dropped() -> None:
    matcher = StopStringMatcher(("END",), include_stop=True)
    assert matcher.push("one EN") == ("one ", None)
    assert matcher.push("D two") == ("END", "END")
    assert matcher.push(" three") == ("", "END")
    assert matcher.finish() == ""


def test_finish_releases_held_text_once() -> None:
    matcher = StopStringMatcher(("END",))
    assert matcher.push("EN") == ("", None)
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


def test_no_stops_and_special_characters() -> None:
    assert StopStringMatcher(()).push("anything") == ("anything", None)
    assert StopStringMatcher(("]",)).push("a]b") == ("a", "]")
    assert StopStringMatcher(("^", "\\")).push("a\\b") == ("a", "\\")
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(("a", ""))


def test_many_long_stops_sharing_one_automaton() -> None:
    rng = random.Random(3)
    stops = ["".join(rng.choices("ab", k=1023)) + "c" for _ in range(64)]
    automaton = StopAutomaton(stops)
    for stop in rng.sample(stops, 8):
        matcher = StopStringMatcher(automaton)
        text = "b" * 50 + stop[:700] + stop
        shown, found = "", None
        for at in range(0, len(text), 5):
            emitted, found = matcher.push(text[at : at + 5])
            shown += emitted
        assert found == stop
        assert shown == "b" * 50 + stop[:700]


class CountingList(list[int]):
    """The failure table, counting how often it is followed."""

    reads = 0

    def __getitem__(self, at: int) -> int:
        self.reads += 1
        return super().__getitem__(at)


class CountingAutomaton(StopAutomaton):
    steps = 0

    def step(self, state: int, char: str) -> int:
        self.steps += 1
        return super().step(state, char)


def test_adversarial_text_costs_linear_time() -> None:
    """Work is counted, not timed: one step a character, and fewer failures than steps."""
    automaton = CountingAutomaton(["a" * 500 + "b", "a" * 300 + "c", "ab" * 400 + "c"])
    automaton.steps = 0
    automaton.failures = failures = CountingList(automaton.failures)
    matcher = StopStringMatcher(automaton)
    text = ("a" * 499 + "x" + "ab" * 399 + "a") * 20
    shown = "".join(matcher.push(text[at : at + 3])[0] for at in range(0, len(text), 3))
    assert shown + matcher.finish() == text
    assert len(text) // 2 < automaton.steps <= len(text)
    assert 499 <= failures.reads <= len(text)


def test_building_many_long_stops_is_quick() -> None:
    """A quadratic build would take minutes here."""
    begin = time.process_time()
    StopAutomaton(["a" * (1024 - i) + "b" for i in range(64)])
    assert time.process_time() - begin < 5
