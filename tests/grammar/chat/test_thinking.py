"""A budget of thoughts in the formats of several families: where their end is forced, and what follows it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from asyncengine.errors import InvalidParameter
from asyncengine.grammar.chat import ChatPlan, ChatPlanner, ChatReader
from asyncengine.grammar.chat.harmony import MARKS
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.thinking import ThinkingMatcher
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.outputs import Chunk

from .models import ADD, HERMES, THINKING, TURNS, tokenizer
from .test_budgets import vocabulary_of
from .test_channels import TEMPLATE

SEED = THINKING.replace("think>", "seed:think>")
KIMI = THINKING.replace("<think>", "\u25c1think\u25b7").replace("</think>", "\u25c1/think\u25b7")
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TURN = "<|im_start|>assistant\n"
CHANNEL = "<|channel|>analysis<|message|>"
FAMILIES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "qwen, begun by the model": ((THINKING, (*TURNS, "<think>", "</think>")), TURN, "<think>"),
    "qwen, begun by the prompt": ((THINKING, (*TURNS, "<think>", "</think>")), TURN + "<think>\n", ""),
    "marks as text": ((THINKING,), TURN, "<think>"),
    "seed": ((SEED, (*TURNS, "<seed:think>", "</seed:think>")), TURN, "<seed:think>"),
    "kimi, marks as text": ((KIMI,), TURN + "\u25c1think\u25b7", ""),
    "harmony": ((TEMPLATE, MARKS), "<|start|>assistant", CHANNEL),
    "harmony as text": ((TEMPLATE, ()), "<|start|>assistant", CHANNEL),
}
"""Tokenizer, end of the prompt, and what the model begins its thoughts with."""
WISHES: dict[str, dict[str, Any]] = {
    "none": {}, "calls": {"tools": [ADD], "tool_choice": "required"}, "answer": {"response_format": ANSWER},
}  # fmt: skip


class Desk:
    """A family's planner, vocabulary and compiler."""

    def __init__(self, family: str) -> None:
        made, self.tail, self.begin = FAMILIES[family]
        self.text = tokenizer(*made)
        self.planner, self.vocabulary = ChatPlanner(self.text), vocabulary_of(self.text)
        self.backend = LlguidanceBackend(self.vocabulary)

    def matcher(self, plan: ChatPlan, budget: int) -> ThinkingMatcher:
        inner = None if plan.grammar is None else Matcher(self.backend.compile(plan.grammar), budget, "close")
        assert plan.thinking is not None
        return ThinkingMatcher(plan.thinking, self.vocabulary, inner)

    def thoughts(self, plan: ChatPlan, tokens: list[int]) -> tuple[str, str, int]:
        """Reasoning, content, and tokens after which the output is amid its thoughts."""
        assert plan.make_parser is not None
        parser, stream, amid = plan.make_parser(), self.text.table.stream(plan.skip_special_tokens), 0
        parts = []
        for token in tokens:
            parts.append(parser.push(stream.push([token])))
            amid += parser.in_reasoning
        parts += [parser.push(stream.finish()), parser.finish()]
        return "".join(part.reasoning for part in parts), "".join(part.text for part in parts), amid


def masked(matcher: Any, vocabulary: Vocabulary) -> list[int]:
    mask = np.zeros(vocabulary.mask_words, dtype=np.int32)
    matcher.fill_mask(mask)
    found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert max(found) < vocabulary.vocab_size
    return [int(token) for token in found]


def written(desk: Desk, matcher: Any, begin: str, budget: int, *, jump: bool) -> list[int]:
    """The output of a model that begins with `begin` as far as it may, and then never ends its thoughts by itself: its
    tokens depend on their place alone."""
    wanted = dict(enumerate(desk.text.encode(begin, False)))
    plain = [i for i, data in enumerate(desk.vocabulary.token_bytes) if data.isalpha() and len(data) == 1]
    tokens: list[int] = []
    while len(tokens) < budget and not matcher.is_terminated():
        allowed = masked(matcher, desk.vocabulary)
        liked = [token for token in plain if token in allowed] or allowed
        token = wanted.get(len(tokens), random.Random(len(tokens)).choice(liked))
        tokens += matcher.accept(token if token in allowed else liked[0], jump)
    return tokens


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_thoughts_end_at_their_budget_and_the_answer_follows(family: str, wish: str) -> None:
    desk = Desk(family)
    free = desk.planner.plan(desk.tail, **WISHES[wish], max_thinking_tokens=1000)
    alone = written(desk, desk.matcher(free, 200), desk.begin, 200, jump=False)
    marks = len(desk.text.encode(desk.begin, False))
    for most in (1, 5, 20):
        plan = desk.planner.plan(desk.tail, **WISHES[wish], max_thinking_tokens=most)
        outputs = [written(desk, desk.matcher(plan, 200), desk.begin, 200, jump=jump) for jump in (True, False)]
        for tokens in outputs:
            assert tokens[: marks + most] == alone[: marks + most]
            assert plan.thinking is not None
            closing = desk.vocabulary.tokenize(plan.thinking.closing)
            assert tokens[marks + most :][: len(closing)] == closing
            reasoning, content, _ = desk.thoughts(plan, tokens)
            assert len(reasoning) == most
            if wish == "answer":
                assert content.startswith("{")
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_none_leaves_no_thoughts(family: str) -> None:
    desk = Desk(family)
    plan = desk.planner.plan(desk.tail, max_thinking_tokens=0)
    tokens = written(desk, desk.matcher(plan, 80), desk.begin, 80, jump=True)
    reasoning, content, amid = desk.thoughts(plan, tokens)
    assert (reasoning, plan.thinking is not None) == ("", True)
    assert content or family == "harmony as text"  # whose answer would need a header
    assert desk.planner.reasoning is not None
    assert amid <= len(
        desk.vocabulary.tokenize(desk.planner.reasoning.end)
    )  # a mark of several tokens is one at its end


def test_further_thoughts_share_the_budget_of_a_channel() -> None:
    desk = Desk("harmony")
    plan = desk.planner.plan(desk.tail, max_thinking_tokens=8)
    again = f"{CHANNEL}one<|end|><|start|>assistant"
    tokens = written(
        desk, desk.matcher(plan, 80), f"{again}{CHANNEL}seven<|end|><|start|>assistant<|channel|>a", 80, jump=True
    )
    assert desk.thoughts(plan, tokens)[0] == "oneseven"
    more = written(desk, desk.matcher(plan, 80), f"{again}{CHANNEL}sevenandmore", 80, jump=True)
    assert desk.thoughts(plan, more)[0] == "oneseven"


def test_a_mark_that_was_begun_is_completed_and_one_of_the_models_own_ends_the_count() -> None:
    desk = Desk("marks as text")
    plan = desk.planner.plan(desk.tail, max_thinking_tokens=6)
    for begin in ("<think>abcd</", "<think>abc</think>"):
        tokens = written(desk, desk.matcher(plan, 60), begin, 60, jump=True)
        output = b"".join(desk.vocabulary.token_bytes[token] for token in tokens).decode()
        assert output.startswith(begin.partition("</")[0] + "</think>")
        assert output.count("</think>") == 1
        assert len(output) == 60


def test_an_end_is_not_forced_within_a_character_that_a_grammar_holds_together() -> None:
    desk = Desk("qwen, begun by the prompt")
    for wish, most, kept in (("answer", 1, "\u20ac"), ("answer", 3, "\u20ac"), ("answer", 4, "\u20ac\u20ac")):
        plan = desk.planner.plan(desk.tail, **WISHES[wish], max_thinking_tokens=most)
        for jump in (True, False):
            tokens = written(desk, desk.matcher(plan, 60), "\u20ac" * 9, 60, jump=jump)
            reasoning, content, _ = desk.thoughts(plan, tokens)
            assert reasoning == kept
            assert content.startswith("{")


def test_what_a_budget_of_the_output_closes_is_told_apart_and_a_forced_mark_is_not() -> None:
    desk = Desk("qwen, begun by the prompt")
    plan = desk.planner.plan(desk.tail, response_format={"type": "string"}, max_thinking_tokens=3)
    matcher = desk.matcher(plan, 40)
    tokens = written(desk, matcher, "abc", 40, jump=True)
    assert len(tokens) == 40
    assert matcher.steered_from is not None
    assert matcher.steered_from > tokens.index(desk.text.encode("</think>", False)[0])
    unheld = desk.matcher(plan, 40)
    unheld.steered_from = 0  # as what was closed elsewhere is resumed
    written(desk, unheld, "abc", 40, jump=True)
    assert unheld.steered_from == 0


def test_thoughts_begin_where_an_output_does() -> None:
    desk = Desk("qwen, begun by the model")
    plan = desk.planner.plan(desk.tail, max_thinking_tokens=2)
    for begin, forced in ((" \n<think>abcd", True), ("So <think>abcd", False)):
        wanted = desk.text.encode(begin, False)
        tokens = written(desk, desk.matcher(plan, 30), begin, 30, jump=True)
        assert (tokens[: len(wanted)] != wanted) is forced


def test_guesses_are_held_to_the_budget_as_what_follows_them_is() -> None:
    """Masks behind guesses are those of an output that has them."""
    for family, wish in (("qwen, begun by the prompt", "none"), ("marks as text", "answer"), ("harmony", "calls")):
        desk = Desk(family)
        plan = desk.planner.plan(desk.tail, **WISHES[wish], max_thinking_tokens=4)
        tokens = written(desk, desk.matcher(plan, 60), desk.begin, 60, jump=False)
        for first in range(0, 40, 3):
            one, along = desk.matcher(plan, 60), desk.matcher(plan, 60)
            for token in tokens[:first]:
                assert along.accept(token, False) == one.accept(token, False) == [token]
            drafts = tokens[first : first + 9]
            masks = np.zeros((1 + len(drafts), desk.vocabulary.mask_words), np.int32)
            filled = along.fill_along(masks, drafts)
            assert filled == 1 + len(drafts) or first + filled == len(tokens)  # where the output is over
            for mask, token in zip(masks[:filled], [*drafts, -1], strict=False):
                expected = np.zeros_like(mask)
                one.fill_mask(expected)
                assert (mask == expected).all()
                if token >= 0:
                    one.accept(token, False)
            assert along.fresh().accept(tokens[0], False) == [tokens[0]]
    desk = Desk("qwen, begun by the prompt")
    matcher = desk.matcher(desk.planner.plan(desk.tail, max_thinking_tokens=2), 60)
    masks = np.zeros((6, desk.vocabulary.mask_words), np.int32)
    guess = desk.text.encode("abcde", False)
    assert matcher.fill_along(masks, guess) == 3  # the third may only be the mark
    assert np.flatnonzero(np.unpackbits(masks[2].view(np.uint8), bitorder="little")).tolist() == desk.text.encode(
        "</think>", False
    )  # fmt: skip


def test_nothing_is_held_where_the_prompt_has_no_thoughts_and_no_format_is_refused() -> None:
    planner = Desk("seed").planner
    assert planner.plan(TURN + "<seed:think>\n\n</seed:think>\n\n", max_thinking_tokens=3).thinking is None
    assert planner.plan(TURN).thinking is None
    for other, most, limit in (
        (ChatPlanner(tokenizer(HERMES)), 5, "max_thinking_tokens: cannot be kept: this model's chat template has no"),
        (planner, -1, "max_thinking_tokens: must be an integer"),
        (planner, True, "max_thinking_tokens: must be an integer"),
    ):
        with pytest.raises(InvalidParameter, match=limit):
            other.plan(TURN, max_thinking_tokens=most)


@pytest.mark.parametrize("end", [None, "length"])
def test_tokens_of_thoughts_are_counted_whether_the_mark_comes_with_them_or_not(end: Any) -> None:
    desk = Desk("qwen, begun by the prompt")
    plan = desk.planner.plan(desk.tail, max_thinking_tokens=2)
    assert plan.make_parser is not None
    for pieces, thought in (
        ([("a", [1]), ("b", [2]), ("</think>", [3]), ("so", [4])], 2),
        ([("a", [1]), ("b</think>", [2, 3]), ("so", [4])], 2),
        ([("ab</think>", [1, 2, 3])], 2),
        ([("a", [1]), ("b", [2])], 2),
    ):
        reader = ChatReader(plan.make_parser, 1)
        for place, (text, ids) in enumerate(pieces):
            reader.read(Chunk(text, ids, end if place == len(pieces) - 1 else None))
        assert reader.reasoning_tokens == thought
        assert reader.thinking == (set() if pieces[-1][0] == "so" else {0})
