"""One request's grammar, as the engine sees it: masks, what a sampled token becomes, and whether the output is over.

Contract line 15: a constrained output that ends for lack of budget is complete. Beside the grammar's state walks a
closing, a known way to a complete output. A sampled token from which that way would no longer fit into what is left
of the budget is not taken; the first token of the way is, in its place. So the way always fits, and the output is
complete when the budget is spent. From the first such token on the output is not the model's (`steered_from`), unless
that says what the sampled one would have come to but for blanks. Where no way is known (a grammar too rich to search in
time) nothing is steered: the output goes on as long as the budget is far from spent, and one that is not complete in
the end is an error.
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
        """`budget`: output tokens at most; for an `on_budget` in `CLOSED` no less than the template's `min_tokens`.

        Raises `GrammarError` if the template is broken.
        """
        self._template = template
        self._budget = budget
        self._on_budget = on_budget
        self.state = template.new_state()
        self.closing: Closing | None = None
        self._waits_until = template.far if on_budget in CLOSED else 0
        """Tokens left with which the closing is made, for which the grammar's costs have to be known; 0: it was."""
        self._left = budget
        self.steered_from: int | None = None
        if on_budget in CLOSED and (not template.far or budget <= template.far):
            self._begin_closing(budget)

    def fresh(self) -> Matcher:
        return Matcher(self._template, self._budget, self._on_budget)

    def fill_mask(self, mask: Mask) -> None:
        key, known = self._shared()
        if known is not None:
            mask[:] = known
            return
        self.state.fill(mask)
        if key is not None:
            self._template.masks.keep(key, mask)

    @staticmethod
    def fill_all(masks: Mask, matchers: Mapping[int, Matcher]) -> dict[int, Exception]:
        """`fill_mask` of each matcher into masks[place], on all cores if its library can. Returns errors by place."""
        errors: dict[int, Exception] = {}
        joint: dict[JointFill, dict[int, LlgState]] = {}
        alike: dict[Key, list[int]] = {}
        done: set[int] = set()
        templates = Counter(matcher._template for matcher in matchers.values())
        for place, matcher in matchers.items():
            if templates[matcher._template] > 1:  # what is at the same position may share its mask
                if matcher._waits_until:
                    matcher._begin_closing(matcher._left, soon=True)
                if matcher.closing is not None:
                    matcher.closing.follow()
            key, known = matcher._shared()
            if known is not None:
                masks[place] = known
                done.add(place)
                continue
            if key is not None:
                alike.setdefault(key, []).append(place)
                if len(alike[key]) > 1:
                    continue  # gets a copy
            if (fill := matcher.state.joint_fill) is not None:
                joint.setdefault(fill, {})[place] = matcher.state
        done = done.union(*(fill(masks, states) for fill, states in joint.items()))
        for key, (first, *others) in alike.items():
            if first in done and matchers[first]._template.masks.keep(key, masks[first]):
                masks[others] = masks[first]
                done.update(others)
        for place, matcher in matchers.items():
            try:
                if place not in done:
                    matcher.fill_mask(masks[place])
            except Exception as error:
                errors[place] = error
        return errors

    def _shared(self) -> tuple[Key | None, Mask | None]:
        """`SharedMasks.find` of where the output stands; None, None where that is not known."""
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
                    break  # nothing is sampled behind the end
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
        taken = self._take_best(token, others if self.may_refuse() else None)
        tokens = [taken]
        if jump and not self.state.is_terminated():
            for forced in self.state.forced():
                if self._left <= 0 or not self._take(forced):
                    break
                tokens.append(forced)
        return tokens

    def _take(self, token: int) -> bool:
        """Move past `token`; False, unmoved, if the output could not be completed within the budget after it."""
        if self._waits_until and self._left <= self._waits_until:
            self._begin_closing(self._left)
        if self.closing is not None and not self.closing.advance(token, self._left - 1):
            return False
        if not self.state.consume(token):
            raise GrammarError("grammar", f"token {token} was sampled, but is not allowed here")
        self._left -= 1
        return True

    def _take_best(self, token: int, others: Callable[[], Sequence[int]] | None) -> int:
        """Move past `token`, or where it does not fit, or begins what there is no room for, past another one: the first
        of `others` that ends what is open, else `token` if it fits, else the first of `others` that does, else the
        engine's own. Returns it. `others`: None where the end is far, or nobody knows any."""
        closing, at_most = self.closing, self._left - 1
        apt = closing is None or others is None or closing.leaves_room(token, at_most)
        if apt and self._take(token):
            return token
        assert closing is not None
        found = [] if others is None else [other for other in others() if other != token]
        if self._left == self._budget:  # nothing at all is no answer
            found.sort(key=self._template.backend.vocabulary.eos_ids.__contains__)
        closed = (other for other in found if closing.leaves_room(other, at_most, closes=True))
        own = (make() for make in (closing.first,))
        for other in itertools.chain(closed, () if apt else (token,), found, own):
            meant = other == token or closing.is_equivalent(token, other)
            if self._take(other):
                if not meant and self.steered_from is None:
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
