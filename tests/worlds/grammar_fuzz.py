"""The random life of `schedule_fuzz`, with real matchers on most requests: each token and each ending is foretold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from support.constrained_reference import constrained_reference, fake_choice
from support.grammar_walks import text_of
from support.small_grammars import NAMES, SmallGrammar, shared_vocabulary, small_grammar
from support.small_vocabulary import EOS, LOGITS, SECOND_EOS
from worlds.schedule_fuzz import Life

from asyncengine.grammar.matcher import Matcher
from asyncengine.lora.admission import AdapterSlots
from asyncengine.options import RequestOptions
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import OnBudget, SamplingParams
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.messages import AdapterReady, GrammarReady, Message, StopText
from asyncengine.step import Batch, StepResult
from asyncengine.testing import FakeExecutor, FakeModel

ENDS = (EOS, SECOND_EOS)


class Breaking(Matcher):
    """A matcher that raises after some tokens, having taken one already: as bad as a library can be."""

    after = 0

    def accept(self, token: int, jump: bool = True, others: Any = None) -> list[int]:
        self.after -= 1
        taken = super().accept(token, jump, others)
        if self.after < 0:
            raise RuntimeError("a library's fault")
        return taken

    def fresh(self) -> Breaking:
        raise AssertionError("a life with broken matchers is not replayed")


@dataclass(frozen=True)
class Plan:
    """The answer that one request must come to, if nothing happens to it."""

    tokens: list[int]
    reason: str
    grammar: SmallGrammar | None = None
    on_budget: OnBudget = "close"
    own_stops: bool = False
    """It has stop ids of its own, which may end it anywhere."""
    breaks: bool = False
    """Its matcher raises sooner or later."""


class GrammarLife(Life):
    """One seed. `faults=False`: no matcher breaks and no row fails, so that the recording can be replayed."""

    def __init__(
        self, seed: int, depth: int | None = None, *, faults: bool = True, states: bool = False, windows: bool = False,
        mixed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(seed, depth, states=states, windows=windows, mixed=mixed)
        rng = self.rng
        self.faults = faults
        self.adapters = AdapterSlots(rng.choice([1, 2]))
        self.scheduler = Scheduler(self.config, self.scheduler.kv, self.adapters, copies=self.recording.copies)
        model = FakeModel(LOGITS, EOS, rng.choice([0, 20]), self.recording.windows)
        recording = self.recording
        self.executor = FakeExecutor(
            recording.num_pages, self.config.page_size, model, recording.num_states,
            num_window_pages=recording.num_window_pages,
        )  # fmt: skip
        self.forced = 0
        """Tokens that grammars forced on requests which were still there to take them."""
        self.check_forced = True
        """False with drafts: forced tokens are then not told from those that were guessed."""
        self.plans: dict[int, Plan] = {}
        self.coming: list[Message] = []
        """Grammars being compiled and adapters being loaded."""
        self.cut_short: set[int] = set()
        self.valid = 0

    # ---------------------------------------------------------------- traffic

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes) + [rng.randrange(2, LOGITS) for _ in range(rng.randrange(1, 20))]
        prompt = prompt[: max(1, self.capacity - 36)]
        found = small_grammar(rng.choice(NAMES)) if rng.random() < 0.75 else None
        on_budget: OnBudget = rng.choice(["close", "close", "close", "truncate", "error"])
        budget = int(rng.expovariate(1 / 8)) + (1 if found is None or on_budget == "truncate" else 0)
        if found is not None and on_budget != "truncate":
            budget += found.template.min_tokens
        most = self.capacity - len(prompt)
        if found is not None and found.template.min_tokens > most:
            found = None
        budget = min(budget, most)
        params = SamplingParams(grammar=found and found.grammar, on_budget=on_budget, logprobs=rng.random() < 0.2)
        stops = (*ENDS, rng.randrange(2, LOGITS), ord("e")) if rng.random() < 0.05 else ENDS
        samples, first = rng.choice([1, 1, 1, 1, 3]), self.last_ticket + 1
        adapter = rng.choice(["", "", "", "a", "b", "c"])
        priority, loads = rng.randrange(3), bool(adapter) and rng.random() < 0.5
        options = RequestOptions(adapter or None, priority=priority, cache_salt=rng.choice([None, None, "tenant"]))
        asked = RequestSpec(
            0,
            tuple(prompt),
            params,
            len(prompt) + budget,
            options,
            stop_ids=stops,
            arrival=self.now,
            group=first if samples > 1 else None,
            deadline=self.now + rng.random() * 60 if rng.random() < 0.08 else None,
            inter_token_timeout=30.0 if rng.random() < 0.04 else None,
        )
        for _ in range(samples):
            self.last_ticket = ticket = self.last_ticket + 1
            spec = replace(asked, ticket=ticket, seed=ticket if samples > 1 else 0)
            ready = None if found is None else self._plan_grammar(spec, prompt, found, budget)
            if ready is None:
                free = self.executor.model.oracle(prompt, budget, spec.seed, stops)
                self.plans[ticket] = Plan(free, "stop" if free[-1] in stops else "length")
            else:
                self.coming.append(ready)
            if loads:
                self.coming.append(AdapterReady(ticket, adapter))
            self.received[ticket] = []
            self.apply(spec)
            if adapter and not loads:
                self.apply(AdapterReady(ticket, adapter))

    def _plan_grammar(self, spec: RequestSpec, prompt: list[int], found: SmallGrammar, budget: int) -> GrammarReady:
        """Plans the request's answer, and returns the message that will bring its matcher (or, seldom, an error)."""
        rng, params = self.rng, spec.params
        if rng.random() < 0.02:
            self.plans[spec.ticket] = Plan([], "error")
            return GrammarReady(spec.ticket, error="did not compile")
        breaks = self.faults and rng.random() < 0.03
        matcher = (Breaking if breaks else Matcher)(found.template, budget, params.on_budget)
        if isinstance(matcher, Breaking):
            matcher.after = rng.randrange(6)
        tokens, reason = constrained_reference(
            fake_choice(self.executor.model, spec.seed),
            shared_vocabulary(),
            prompt,
            Matcher(found.template, budget, params.on_budget),
            budget,
            jump=not params.logprobs,
            stop_ids=spec.stop_ids,
        )
        own_stops = len(spec.stop_ids) > len(ENDS)
        self.plans[spec.ticket] = Plan(tokens, reason, found, params.on_budget, own_stops, breaks)
        return GrammarReady(spec.ticket, matcher)

    def someone_leaves(self) -> None:
        super().someone_leaves()
        rng = self.rng
        for message in [message for message in self.coming if rng.random() < 0.3]:
            self.coming.remove(message)
            self.apply(message)
        if self.faults and self.scheduler.requests and rng.random() < 0.01:
            self.executor.fail_tickets[rng.choice(list(self.scheduler.requests))] = "the row failed"

    def apply(self, message: Message) -> None:
        super().apply(message)
        if isinstance(message, StopText):
            self.cut_short.add(message.ticket)

    # ---------------------------------------------------------------- books

    def before_commit(self, batch: Batch, result: StepResult) -> None:
        for index, further in result.further.items():
            row = batch.rows[index]
            if row.grammar is not None and not row.drafts and row.spec.ticket in self.scheduler.requests:
                self.forced += _taken(result.tokens[index], further, row.spec.stop_ids)

    def check_end(self) -> None:
        errors = {output.ticket: output.error for output in self.outputs if output.reason is not None}
        for ticket, plan in self.plans.items():
            reason, received, error = self.ended.get(ticket), self.received[ticket], errors.get(ticket)
            assert reason is not None, f"ticket {ticket} was lost"
            said = f"ticket {ticket} ended with {reason} ({error}), planned {plan.reason}"
            if reason in ("abort", "timeout") or (reason == "stop" and ticket in self.cut_short):
                assert received == plan.tokens[: len(received)], f"{said}: wrong tokens before it left"
            elif reason == "error" and error == "the row failed":
                assert ticket in self.executor.fail_tickets, said
                assert received == plan.tokens[: len(received)], f"{said}: wrong tokens before it failed"
            elif reason == "error" and plan.breaks:
                assert received == plan.tokens[: len(received)], f"{said}: wrong tokens before it broke"
            else:
                assert (reason, received) == (plan.reason, plan.tokens), f"{said}: {received}, planned {plan.tokens}"
                self._check_valid(plan, received)
        counters, pages = self.scheduler.counters, self.scheduler.kv.counts([])
        assert (pages.free + pages.cached, pages.shared, pages.retiring) == (pages.total, 0, 0), f"leaked: {pages}"
        self.scheduler.check_sums()
        assert not self.adapters.in_use, f"adapters never released: {self.adapters.in_use}"
        assert counters.generated_tokens == sum(map(len, self.received.values()))
        if self.check_forced:
            assert counters.forced_tokens == self.forced

    def _check_valid(self, plan: Plan, tokens: list[int]) -> None:
        """Checks that what ended by itself or by its budget is complete, whatever was foretold (contract line 15)."""
        if plan.grammar is None or plan.own_stops:
            return
        if plan.reason == "error":
            assert plan.on_budget != "close", "the way to a complete output of a small grammar is always known"
            return
        if plan.reason == "stop" or plan.on_budget == "close":
            plan.grammar.validate(text_of(shared_vocabulary(), tokens))
            self.valid += 1

    def counts(self) -> Counter[str]:
        return super().counts() + Counter(
            requests=len(self.plans),
            constrained=sum(plan.grammar is not None for plan in self.plans.values()),
            valid=self.valid,
            forced=self.scheduler.counters.forced_tokens,
        )


def _taken(sampled: int, forced: list[int], stop_ids: tuple[int, ...]) -> int:
    """The number of tokens of `forced` that a request takes: a stop id ends it, forced or not."""
    for count, token in enumerate([sampled, *forced]):
        if token in stop_ids:
            return count
    return len(forced)
