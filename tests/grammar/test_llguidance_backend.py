"""llguidance's states, and each of the library's traps."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import llguidance
import numpy as np
import pytest
from support.data import cases_of
from support.grammar_walks import allowed, text_of, walk
from support.small_vocabulary import EOS, LOGITS, MARK, PIECES, SECOND_EOS

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.grammar.closing import recognizer
from asyncengine.grammar.llguidance_backend import LlgState, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.shared_masks import KEY_BYTES, READING_BYTES, Mask, SharedMasks
from asyncengine.grammar.vocabulary import Vocabulary

ROWS: dict[str, Any] = cases_of(__file__)


def ids(state: LlgState, vocabulary: Vocabulary) -> set[int]:
    mask = np.full(vocabulary.mask_words, -1, dtype=np.int32)  # stale bits must be overwritten
    state.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def spell(state: LlgState, text: str) -> bool:
    return all(state.consume(byte) for byte in text.encode())


def test_masks_cover_the_padded_vocabulary_and_all_ends_of_sequence(
    backend: LlguidanceBackend, vocabulary: Vocabulary
) -> None:
    state = backend.compile(Grammar.regex("(abc)?")).new_state()
    assert ids(state, vocabulary) == {ord("a"), 256 + PIECES.index("abc"), EOS, SECOND_EOS}
    assert vocabulary.mask_words == -(-LOGITS // 32)


def test_a_refused_token_changes_nothing(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    state = backend.compile(Grammar.regex("abc")).new_state()
    for token in (ord("x"), EOS, MARK, LOGITS - 1, 256 + PIECES.index("zz")):
        assert not state.consume(token)
    assert spell(state, "abc")
    assert state.is_accepting()


def test_rollback_counts_ends_of_sequence(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    """llguidance's own rollback does not count an end of sequence consumed after the grammar had stopped."""
    state = backend.compile(Grammar.regex("a{2,3}b")).new_state()
    assert spell(state, "aab")
    assert state.is_terminated()
    assert ids(state, vocabulary) == {EOS, SECOND_EOS}
    assert state.consume(EOS)
    assert state.consume(SECOND_EOS)
    state.rollback(1)
    assert state.is_terminated()
    state.rollback(1)
    assert ids(state, vocabulary) == {EOS, SECOND_EOS}
    state.rollback(2)
    assert ids(state, vocabulary) == {ord("a")}
    with pytest.raises(ValueError, match="roll back"):
        state.rollback(9)


def test_every_prefix_can_be_rolled_back(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    template = backend.compile(Grammar.json_schema({"type": "object", "additionalProperties": {"type": "integer"}}))
    state, masks = template.new_state(), []
    tokens = list(b'{"a": 10, "b":2}')
    for token in tokens:
        masks.append(ids(state, vocabulary))
        assert state.consume(token)
    for mask in reversed(masks):
        state.rollback(1)
        assert ids(state, vocabulary) == mask


def test_forced_tokens_are_the_tokenizers_own_cut(vocabulary: Vocabulary) -> None:
    """`"name` is forced; of its spellings the one the tokenizer would use."""
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return vocabulary.tokenize(text)

    own = Vocabulary(vocabulary.token_bytes, vocabulary.eos_ids, [MARK], LOGITS, encode)
    schema = {
        "type": "object",
        "properties": {"name": {"const": "the"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    state = LlguidanceBackend(own).compile(Grammar.json_schema(schema, whitespace="compact")).new_state()
    forced = state.forced()
    assert calls
    assert b"".join(own.token_bytes[t] for t in forced).startswith(b'{"name":')
    assert forced[0] == 256 + PIECES.index('{"name')
    for token in forced:
        assert state.consume(token)


def test_a_limit_is_an_error_and_never_a_silent_end(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    """In its error state the library allows the end of sequence only: an output would stop in the middle, unnoticed."""
    template = backend.compile(Grammar.json_schema({"type": "array", "items": {"type": "string"}}))
    state = template.new_state()
    assert spell(state, '["a')
    broken = llguidance.LLMatcher(vocabulary.ll_tokenizer, llguidance.LLMatcher.grammar_from_regex("a"), log_level=0)
    broken.consume_token(ord("z"))
    assert broken.is_error()
    state.matcher = broken
    heard = state.consume(ord("b"))  # healed from its own tokens
    assert heard
    assert spell(state, '"]')
    assert state.is_accepting()


def test_a_state_that_cannot_heal_raises(
    backend: LlguidanceBackend, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = backend.compile(Grammar.regex("a+")).new_state()
    broken = llguidance.LLMatcher(vocabulary.ll_tokenizer, llguidance.LLMatcher.grammar_from_regex("a"), log_level=0)
    broken.consume_token(ord("z"))
    state.matcher = broken
    monkeypatch.setattr(type(state.template), "fresh_matcher", lambda self: broken)
    with pytest.raises(GrammarError):
        ids(state, vocabulary)


def test_error_texts_do_not_quote_the_output(backend: LlguidanceBackend) -> None:
    matcher = backend.compile(Grammar.json_schema({"type": "string"})).fresh_matcher()
    for token in b'"SECRET':
        matcher.consume_token(token)
    matcher.consume_token(MARK)
    assert matcher.is_error()
    assert "SECRET" not in matcher.get_error()


def test_special_tokens_match_by_name_and_by_number_only(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    for reference in ("<|mark|>", f"<[{MARK}]>"):
        state = backend.compile(Grammar.lark(f'start: {reference} "x"')).new_state()
        assert ids(state, vocabulary) == {MARK}
    text = backend.compile(Grammar.regex(r"<\|mark\|>")).new_state()
    assert MARK not in ids(text, vocabulary)


def test_copies_share_nothing_but_the_lexer(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    template = backend.compile(Grammar.json_schema({"type": "array", "items": {"type": "integer"}}))
    rng = random.Random(3)
    matchers = [Matcher(template, 60, "close") for _ in range(12)]
    outputs: list[list[int]] = [[] for _ in matchers]
    for _ in range(60):  # interleaved
        for index, matcher in enumerate(matchers):
            if not matcher.is_terminated() and len(outputs[index]) < 60:
                outputs[index] += matcher.accept(int(rng.choice(allowed(vocabulary, matcher).tolist())))
    for tokens in outputs:
        assert text_of(vocabulary, tokens).startswith("[")
        assert text_of(vocabulary, tokens).endswith("]")


def test_what_cannot_be_enforced_is_refused_by_name(backend: LlguidanceBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"multipleOf": 3}}}}
    with pytest.raises(GrammarUnsupported) as refused:
        backend.compile(Grammar.json_schema(schema))
    assert refused.value.features == (("not", "/properties/a/not"),)
    backend.compile(Grammar.json_schema(schema, unsupported="ignore"))


def test_walks_match_the_pattern(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    import re

    pattern = r"[a-z]+( [a-z]+)*\.(日本|é)?"
    template, rng = backend.compile(Grammar.regex(pattern)), random.Random(2)
    for budget in range(template.min_tokens, 40):
        tokens, _ = walk(vocabulary, Matcher(template, budget, "close"), budget, rng)
        assert re.fullmatch(pattern, text_of(vocabulary, tokens))


def test_masks_of_many_at_once_are_those_one_by_one(
    backend: LlguidanceBackend, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks go into any rows of memory that holds anything; a broken matcher heals, or is an error of its own."""
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "string"}})
    template, lost = backend.compile(grammar), backend.compile(grammar)
    matchers = {place: Matcher(lost if place == 4 else template, 40, "truncate") for place in (5, 0, 3, 4, 1)}
    for place, matcher in matchers.items():
        assert all(matcher.accept(byte, False) for byte in b'["ab"]'[:place])
    matchers[2] = ended = Matcher(backend.compile(Grammar.regex("a")), 40, "truncate")
    ended.accept(ord("a"), False)
    ended.accept(EOS, False)
    masks = np.full((7, vocabulary.mask_words), -1, dtype=np.int32)
    wanted = masks.copy()
    for place, matcher in matchers.items():
        matcher.fill_mask(wanted[place])
    assert Matcher.fill_all(masks, matchers) == {}
    assert np.array_equal(masks, wanted)
    regex = llguidance.LLMatcher.grammar_from_regex("a")
    for place in (0, 4):
        broken = llguidance.LLMatcher(vocabulary.ll_tokenizer, regex, log_level=0)
        broken.consume_token(ord("z"))
        matchers[place].state.matcher = broken  # type: ignore[attr-defined]
    monkeypatch.setattr(lost, "fresh_matcher", Mock(side_effect=GrammarError("grammar", "lost")))
    masks[:] = -1
    assert list(Matcher.fill_all(masks, matchers)) == [4]
    others = [0, 1, 2, 3, 5, 6]
    assert np.array_equal(masks[others], wanted[others])


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "many": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "many"],
}


def test_outputs_at_one_position_share_a_mask(
    backend: LlguidanceBackend, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is asked once, however outputs came there, together or one after the other."""
    template = backend.compile(Grammar.json_schema(SCHEMA))
    texts = [b'{"name": "ab', b'{"name": "\xc3\xbcz', b'{ "name":"xyz', b'{"n', b'{"n', b'{"name": "a']
    wanted = np.zeros((len(texts), vocabulary.mask_words), dtype=np.int32)
    found = np.full_like(wanted, -1)
    asked: list[int] = []
    fill_all = LlguidanceBackend.fill_all

    def counted(self: LlguidanceBackend, masks: Mask, states: Mapping[int, LlgState]) -> set[int]:
        asked.extend(states)
        return fill_all(self, masks, states)

    monkeypatch.setattr(LlguidanceBackend, "fill_all", counted)
    for turn in range(2):
        matchers = {place: Matcher(template, 99, "close") for place in range(len(texts))}
        for place, matcher in matchers.items():
            for byte in texts[place]:
                matcher.accept(byte, False)
            LlgState.fill(matcher.state, wanted[place])
        assert Matcher.fill_all(found, matchers) == {}
        assert np.array_equal(found, wanted)
        for place, matcher in matchers.items():
            found[place] = -1
            matcher.fill_mask(found[place])
        assert np.array_equal(found, wanted)
        assert asked == ([0, 3, 5] if turn == 0 else []), "of those at one place the first"
        asked.clear()


def test_masks_of_forced_text_are_shared_behind_the_same_token() -> None:
    """The token that the library allows there depends on the one before, not on others."""
    masks, position = SharedMasks(2**20), (3, 5)
    first, second = np.array([[0, 4, 0], [0, -(2**31), 0]], dtype=np.int32)
    key, known = masks.find(position, 7)
    assert known is None
    assert not masks.keep(key, first), "others at this position may need another one"
    for before, mask in ((7, first), (8, second)):
        key, known = masks.find(position, before)
        assert known is None
        assert masks.keep(key, mask)
    assert masks.find(position, 7)[1].tolist() == first.tolist()  # type: ignore[union-attr]
    assert masks.find(position, 8)[1].tolist() == second.tolist()  # type: ignore[union-attr]


def test_memory_for_shared_masks_is_bounded() -> None:
    """Masks that were used last are kept longest, and the readings of a position count."""
    mask = np.full(8, 3, dtype=np.int32)
    masks, positions = SharedMasks(3 * (mask.nbytes + KEY_BYTES + READING_BYTES)), [(at,) for at in range(4)]
    for position in positions[:3]:
        assert masks.keep((position, None), mask)
    assert masks.find(positions[0], 1)[1] is not None
    assert masks.keep((positions[3], None), mask)
    assert [masks.find(position, 1)[1] is not None for position in positions] == [True, False, True, True]
    masks.keep(((4,) * 9, None), mask)
    assert [masks.find(position, 1)[1] is not None for position in positions] == [False, False, False, True]


@pytest.mark.parametrize(("pattern", "texts"), ROWS["who_has_a_mask_of_its_own"])
def test_who_has_a_mask_of_its_own(
    pattern: str, texts: list[str], backend: LlguidanceBackend, vocabulary: Vocabulary
) -> None:
    """Two characters lead to one position only where they are the same to the library, and no budget is misjudged."""
    template = backend.compile(Grammar.regex(pattern))
    mask, own = (np.zeros(vocabulary.mask_words, dtype=np.int32) for _ in range(2))
    for text in texts:
        for budget in range(template.min_tokens, 10):
            matcher = Matcher(template, budget, "close")
            taken: list[int] = []
            for byte in [*text.encode(), *b"ab"]:
                matcher.fill_mask(mask)
                matcher.state.fill(own)
                assert np.array_equal(mask, own)
                if mask[byte // 32] >> byte % 32 & 1 and len(taken) < budget:
                    taken += matcher.accept(byte)
            while len(taken) < budget and not matcher.is_terminated():
                matcher.fill_mask(mask)
                taken += matcher.accept(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]))
            assert matcher.overrun() is None, (text, budget)


def test_an_output_leaves_nothing_behind_in_its_grammar(
    backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places that were come to are let go: each leads to those behind it."""
    monkeypatch.setattr(recognizer, "MAX_FRAMES", 256)
    template = backend.compile(Grammar.lark('start: "(" start* ")" | "[" start "]" | "x"'))
    gc.collect()
    before = sum(isinstance(one, recognizer.Frame) for one in gc.get_objects())
    rng = random.Random(1)
    for _ in range(8):
        closing = template.new_closing()
        for _ in range(150):
            assert closing.advance(rng.choice(b"(["), 10**6)
    del closing
    gc.collect()
    assert sum(isinstance(one, recognizer.Frame) for one in gc.get_objects()) - before < 600
