"""One request's grammar, as the engine sees it: masks, what a sampled token becomes, and whether the output is over.

Contract line 15: a constrained output that ends for lack of budget is complete. A `Closing` follows the grammar's state
and knows a completion of the output. A sampled token behind which the cheapest completion would not fit the budget is
replaced, at last by the first token of the completion. So a completion always fits, and the output is complete when the
budget is spent. From the first replaced token on the output is not the model's (`steered_from`), unless the replacement
leads to the same text up to blanks. Where no completion is known (the grammar is too ambiguous to parse in time)
nothing is steered: the output goes on while the budget is large, and is an error if it ends incomplete.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncengine.errors import GrammarError
from asyncengine.sampling_params import CLOSED, OnBudget

if TYPE_CHECKING:
    from asyncengine.grammar.closing.closing import Closing
    from asyncengine.grammar.llguidance_backend import LlgState, LlgTemplate
    from asyncengine.grammar.shared_masks import JointFill, Key, Mask


class Matcher:
    """A `step.GrammarMatcher`. Used by one thread at a time: the one that runs the step its row is in."""

    def __init__(self, template: LlgTemplate, budget: int, on_budget: OnBudget) -> None:
        """`budget`: most output tokens; for an `on_budget` in `CLOSED` not below the template's `min_tokens`.

        Raises `GrammarError` if the template is broken.
        """
        self._template = template
        self._budget = budget
        self._on_budget = on_budget
        self.state = template.new_state()
        self.closing: Closing | None = None
        self._waits_until = template.far if on_budget in CLOSED else 0
        """The closing, which needs the grammar's costs, is made once so few tokens are left; 0: it is made."""
        self._left = budget
        self.steered_from: int | None = None
        if on_budget in CLOSED and (not template.far or budget <= template.far):
            self._begin_closing(budget)

    def fresh(self) -> Matcher:
        return Matcher(self._template, self._budget, self._on_budget)

    def fill_mask(self, mask: Mask) -> None:
        key, shared = self._shared()
        if shared is not None:
            mask[:] = shared
            return
        self.state.fill(mask)
        if key is not None:
            self._template.masks.keep(key, mask)

    @staticmethod
    def fill_all(masks: Mask, matchers: Mapping[int, Matcher]) -> dict[int, Exception]:
        """`fill_mask` of each matcher into masks[row], on all cores if its library can. Returns errors by row."""
        errors: dict[int, Exception] = {}
        joint: dict[JointFill, dict[int, LlgState]] = {}
        rows_of: dict[Key, list[int]] = {}
        filled: set[int] = set()
        templates = Counter(matcher._template for matcher in matchers.values())
        for row, matcher in matchers.items():
            if templates[matcher._template] > 1:  # rows at the same position may share a mask: find out which
                if matcher._waits_until:
                    matcher._begin_closing(matcher._left, soon=True)
                if matcher.closing is not None:
                    matcher.closing.follow()
            key, mask = matcher._shared()
            if mask is not None:
                masks[row] = mask
                filled.add(row)
                continue
            if key is not None:
                rows_of.setdefault(key, []).append(row)
                if len(rows_of[key]) > 1:
                    continue  # gets a copy of the first one's mask
            if (fill := matcher.state.joint_fill) is not None:
                joint.setdefault(fill, {})[row] = matcher.state
        filled = filled.union(*(fill(masks, states) for fill, states in joint.items()))
        for key, (first, *copies) in rows_of.items():
            if first in filled and matchers[first]._template.masks.keep(key, masks[first]):
                masks[copies] = masks[first]
                filled.update(copies)
        for row, matcher in matchers.items():
            try:
                if row not in filled:
                    matcher.fill_mask(masks[row])
            except Exception as error:
                errors[row] = error
        return errors

    def _shared(self) -> tuple[Key | None, Mask | None]:
        """`SharedMasks.find` at the output's position; (None, None) if that is unknown."""
        position = None if self.closing is None else self.closing.position
        if position is None or self.state.ended:
            return None, None
        return self._template.masks.find(position, self.state.last)

    def fill_along(self, masks: Mask, drafts: Sequence[int]) -> int:
        self.state.fill(masks[0])
        filled, taken = 1, 0
        try:
            for draft in drafts:
                if not self.state.consume(draft):
                    break
                taken += 1
                if self.state.is_terminated():
                    break  # no token is sampled behind the end
                self.state.fill(masks[taken])
                filled += 1
        finally:
            self.state.rollback(taken)
        return filled

    def _begin_closing(self, left: int, soon: bool = False) -> None:
        """Make the closing, if the grammar's costs are known by now (`LlgTemplate.has_costs`)."""
        if self._template.has_costs(left, soon):
            self._waits_until = 0
            self.closing = self._template.new_closing(self.state.tokens)

    def may_refuse(self, ahead: int = 0) -> bool:
        if self._waits_until and self._left - ahead <= self._waits_until:
            self._begin_closing(self._left - ahead)
        return self.closing is not None and self._left - ahead <= self._template.reach

    def accept(self, token: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        accepted = self._take_best(token, others if self.may_refuse() else None)
        tokens = [accepted]
        if jump and not self.state.is_terminated():
            for forced in self.state.forced():
                if self._left <= 0 or not self._take(forced):
                    break
                tokens.append(forced)
        return tokens

    def _take(self, token: int) -> bool:
        """Move past `token`. False, and nothing changed, if the output could then not be completed in the budget."""
        if self._waits_until and self._left <= self._waits_until:
            self._begin_closing(self._left)
        if self.closing is not None and not self.closing.advance(token, self._left - 1):
            return False
        if not self.state.consume(token):
            raise GrammarError("grammar", f"token {token} was sampled, but is not allowed here")
        self._left -= 1
        return True

    def _take_best(self, token: int, others: Callable[[], Sequence[int]] | None) -> int:
        """Move past `token`, or if it does not fit, or opens something without room for it, past a replacement: the
        first of `others` that brings the end nearer, else `token` if it fits, else the first of `others` that fits,
        else the completion's. Returns the token taken. `others`: alternatives, best first; None while the budget is
        large, or if the caller has none."""
        closing, at_most = self.closing, self._left - 1
        has_room = closing is None or others is None or closing.leaves_room(token, at_most)
        if has_room and self._take(token):
            return token
        assert closing is not None
        alternatives = [] if others is None else [other for other in others() if other != token]
        if self._left == self._budget:  # an empty output is the last resort
            alternatives.sort(key=self._template.backend.vocabulary.eos_ids.__contains__)
        closing_tokens = (other for other in alternatives if closing.leaves_room(other, at_most, closes=True))
        engine_token = (make() for make in (closing.first,))
        for other in itertools.chain(closing_tokens, () if has_room else (token,), alternatives, engine_token):
            is_equivalent = other == token or closing.is_equivalent(token, other)
            if self._take(other):
                if not is_equivalent and self.steered_from is None:
                    self.steered_from = self._budget - at_most - 1
                return other
        raise GrammarError("grammar", "no complete output fits the budget any more")

    def is_terminated(self) -> bool:
        return self.state.is_terminated()

    def overrun(self) -> str | None:
        if self._on_budget == "truncate" or self.state.is_accepting():
            return None
        if self._on_budget in CLOSED:
            return "no way to a complete output was found before the budget (max_tokens or the context) ended"
        return "the budget (max_tokens or the context) ended before the constrained output was complete"
