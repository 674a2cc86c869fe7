"""Random lives of a scheduler whose model gets other weights again and again."""

from __future__ import annotations

from collections import Counter

from worlds.schedule_fuzz import EOS, Life

from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import Message, UpdateWeights, WithdrawUpdate


class UpdateLife(Life):
    """Every token is checked against the weights of its moment, and every request against those it may meet."""

    def __init__(self, seed: int, *, states: bool = False, mixed: bool = False) -> None:
        super().__init__(seed, states=states, mixed=mixed)
        self.losing = False
        self.executor.lose = lambda row: False
        self.next_number = 0
        self.asked: dict[int, str] = {}
        self.happened: list[int] = []
        self.came_after: dict[int, list[int]] = {}
        """Updates that were waiting when a request came, by its ticket."""
        self.seen: dict[int, list[int]] = {}
        """Weights of a request's tokens, by its ticket."""
        self.asked_of: dict[int, tuple[list[int], int]] = {}
        """Prompt and seed of a request, by its ticket."""
        self.recomputed = 0
        """Updates that found requests running."""

    def apply(self, message: Message) -> None:
        if isinstance(message, RequestSpec):
            self.asked_of[message.ticket] = ([*message.prompt], message.seed)
        super().apply(message)

    def turn(self) -> None:
        rng = self.rng
        for ticket in self.expected:
            self.came_after.setdefault(ticket, list(self.asked))
        if rng.random() < 0.04:
            number = self.next_number = self.next_number + 1
            self.asked[number] = rng.choice(["wait", "wait", "recompute"])
            self.apply(UpdateWeights(number, self.asked[number]))  # type: ignore[arg-type]
        if self.asked and rng.random() < 0.02:
            number = rng.choice(list(self.asked))
            del self.asked[number]
            self.apply(WithdrawUpdate(number))
        if (due := self.scheduler.due_update) is not None:
            assert not self.in_flight
            assert due == next(iter(self.asked)), "out of order"
            self.read()
            self.recomputed += bool(self.scheduler.running)
            if self.asked.pop(due) == "wait":
                assert all(due in self.came_after[ticket] for ticket in self.scheduler.requests), "not waited for"
            self.happened.append(due)
            self.recording.record("start_anew", due)
            self.scheduler.start_anew(due)
            self.scheduler.check()
            self.executor.update(due)
        super().turn()

    def read(self) -> None:
        known = {ticket: len(tokens) for ticket, tokens in self.received.items()}
        super().read()
        for ticket, received in self.received.items():
            prompt, seed = self.asked_of[ticket]
            for place in range(known[ticket], len(received)):
                assert received[place] == self.executor.model.next_token([*prompt, *received[:place]], seed), ticket
                self.seen.setdefault(ticket, []).append(self.executor.model.weights)

    def check_end(self) -> None:
        for ticket, weights in self.seen.items():
            missed = [number for number in self.came_after[ticket] if number in self.happened]
            first = self.happened.index(weights[0]) if weights[0] else -1
            assert all(self.happened.index(number) <= first for number in missed), f"{ticket} was answered too soon"
        for ticket, received in self.received.items():  # the tokens were checked one by one
            if self.ended.get(ticket) == "length" or received[-1:] == [EOS]:
                self.expected[ticket] = received
            else:
                self.expected[ticket] = [*received, -1]
        super().check_end()

    def counts(self) -> Counter[str]:
        several = sum(len(set(weights)) > 1 for weights in self.seen.values())
        return super().counts() + Counter(
            updates=len(self.happened), recomputed=self.recomputed, of_several_weights=several
        )
