"""A random life of a scheduler on the fake runner with KV memory, checked against the oracle at every turn."""

from __future__ import annotations

import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncengine.config import EngineConfig
from asyncengine.images import ImageSpan
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.page_group import BESIDE
from asyncengine.kvcache.radix_tree import STRATEGIES, Lookback
from asyncengine.options import RequestOptions
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler import Output, Scheduler
from asyncengine.scheduler.messages import Abort, Message, ResetPrefixCache, Resume, SessionEvent, StopText, Suspend
from asyncengine.step import Batch, RecordType, Row, StepResult
from asyncengine.testing import FakeExecutor, FakeModel, Recording
from asyncengine.testing.fake_runner import content, fake_vector

EOS = 1
MAX_TURNS = 20_000
TENANTS = [None, "a", "b"]
SESSIONS = [None, "s", "t", "u"]
LONGEST = 3
"""Pools that a request may be long, where it need not fit into one."""


def random_windows(rng: random.Random) -> tuple[tuple[int, int], ...]:
    """Kinds of windows, mostly of layers that all have one."""
    kinds = [(rng.choice([1, 3, 8, 20, 33]), 0) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.4:
        kinds.append((rng.choice([0, 0, 5]), rng.choice([4, 6, 16, 32])))
    if rng.random() < 0.1:
        kinds.append((0, 0))
    return tuple(kinds)


def random_window_pages(rng: random.Random, kinds: tuple[tuple[int, int], ...], page_size: int) -> int:
    """A number of window pages, from as few as one request needs to go on."""
    near = Lookback.of(kind for kind in kinds if any(kind))
    assert near is not None
    return 2 + BESIDE + near.span // page_size + rng.choice([0, 0, 1, 3, 10, 30])


def window_pages(row: Row, start: int, page_size: int) -> list[int]:
    """The window pages that `row` names of positions from `start` on."""
    if row.window is None:
        return []
    first, end = row.window.first, -(-(row.start + row.num_scheduled) // page_size)
    return row.window.pages[max(start // page_size - first, 0) : end - first]


class Life:
    """One seed: a random configuration, random traffic, and the books of what must come out."""

    def __init__(
        self, seed: int, depth: int | None = None, *, states: bool = False, windows: bool = False, vectors: float = 0.0,
        mixed: bool = False, books_every: int = 1,
    ) -> None:  # fmt: skip
        """`states`: of a model that keeps recurrent states. `windows`: of one that sees no further than so far.
        `mixed`: of one of which some layers do, in pages of their own. `vectors`: the share of requests for vectors.
        `books_every`: the scheduler's books are checked at every n-th of the places where they can be (that is half
        of a life's time); tokens always are, and the books at the end."""
        self.seed = seed
        self._places, self._books_every, self.copies = 0, books_every, 0
        self.tenants = random.Random(seed)
        self.readers = random.Random(f"readers {seed}")
        self.resets = random.Random(f"resets {seed}")
        self.sessions = random.Random(f"sessions {seed}")
        self.share_of_vectors = vectors
        self.rng = rng = random.Random(seed)
        num_pages = rng.choice([12, 20, 40, 80])
        self.config = EngineConfig(
            policy=self._policy(rng.choice(["fcfs", "priority", "longest-prefix-match", "shortest-remaining"])),
            page_size=rng.choice([2, 4, 16]),
            max_num_seqs=rng.choice([1, 2, 4, 16]),
            max_num_batched_tokens=rng.choice([1, 7, 16, 64, 1000]),
            long_prefill_token_threshold=rng.choice([None, 1, 5]),
            prefix_caching=rng.random() < 0.7,
            eviction=rng.choice([*STRATEGIES]),
            max_passes=rng.choice([1, 4, 64]),
            admission_lookahead=rng.choice([0, 3, 64]),
            preempt_every=rng.choice([None, None, 3, 7]),
            max_steps_in_flight=depth or rng.choice([1, 1, 2]),
        )
        if random.Random(f"stages {seed}").random() < 0.5:  # steps of a pipeline are of different requests
            self.config = self.config.replace(pipeline_parallel=self.config.max_steps_in_flight)
        num_states = rng.choice([2, 3, 5, 9, 33]) if states else 0
        kinds = random_windows(rng) if windows or mixed else ()
        if mixed:
            kinds = (*kinds, (0, 0))
        own = random_window_pages(rng, kinds, self.config.page_size) if mixed else 0
        self.recording = Recording(
            self.config, num_pages, num_states=num_states, windows=kinds, num_window_pages=own
        )  # fmt: skip
        kv = KVCache(
            num_pages,
            self.config.page_size,
            prefix_caching=self.config.prefix_caching,
            eviction=self.config.eviction,
            num_states=num_states,
            windows=kinds,
            num_window_pages=own,
            most_ahead=self.config.most_ahead,
        )
        self.capacity = min(kv.longest, LONGEST * kv.pool.capacity * self.config.page_size)
        self.recording.copies = bool(seed % 4)
        self.scheduler = Scheduler(self.config, kv, copies=self.recording.copies)
        model = FakeModel(eos_every=rng.choice([0, 20]), windows=kinds)
        self.executor = FakeExecutor(num_pages, self.config.page_size, model, num_states, num_window_pages=own)
        self.predict: Callable[[Sequence[int]], tuple[int, ...]] = lambda right: ()
        """The caller's prediction of a request's answer; `right` is what the answer is."""
        self.windowed = kv.lookback is not None
        self.losing = states and seed % 4 == 2
        """Some steps have not enough memory, and states that they had begun to move are lost."""
        if self.losing:
            chance = random.Random(seed)
            self.executor.lose = lambda row: chance.random() < 0.02
        self.prefixes = [[rng.randrange(2, 97) for _ in range(rng.randrange(40))] for _ in range(4)]
        self.in_flight: deque[Batch] = deque()
        self.early = bool(seed % 2)
        """Steps are computed when they are launched, else when their results are wanted: a device is in between."""
        self.computed: deque[StepResult] = deque()
        self.now = 0.0
        self.last_ticket = 0
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.expected_vectors: dict[int, list[float]] = {}
        self.vectors: dict[int, list[float]] = {}
        self.outputs: list[Output] = []

    def _policy(self, drawn: str) -> str:
        """Every fifth life shares its engine among tenants."""
        return "weighted-fair" if self.seed % 5 == 4 else drawn

    def run(self) -> None:
        """Runs to the end of all requests. Raises with the path of a replay file if anything is not as it must be."""
        try:
            self._live()
            self.check_end()
        except BaseException as error:
            path = Path(tempfile.gettempdir()) / f"asyncengine-fuzz-{self.seed}.jsonl"
            self.recording.save(path)
            error.add_note(f"seed {self.seed}, {self.config}\nreplay file: {path}")
            raise

    def _live(self) -> None:
        to_come = self.rng.randrange(20, 80)
        turns = 0
        while to_come or self.scheduler.requests or self.in_flight:
            turns += 1
            assert turns < MAX_TURNS, "requests that never finish"
            self.now += self.rng.random()
            while to_come and self.rng.random() < 0.3:
                to_come -= 1
                self.arrive()
            self.someone_leaves()
            self.someone_stops_reading()
            self.someone_resets_the_cache()
            self.a_session_says_something()
            self.turn()

    def arrive(self) -> None:
        rng = self.rng
        if self.share_of_vectors and rng.random() < self.share_of_vectors:
            self._arrive_for_a_vector()
            return
        prompt = rng.choice(self.prefixes) + [rng.randrange(2, 97) for _ in range(rng.randrange(1, 30))]
        if self.windowed and rng.random() < 0.1:
            prompt += [rng.randrange(2, 97) for _ in range(rng.randrange(200))]
        prompt = prompt[: self.capacity - 2]
        samples, first = rng.choice([1, 1, 1, 3]), self.last_ticket + 1
        most = 400 if self.windowed and rng.random() < 0.05 else 40
        max_total = min(len(prompt) + rng.randrange(1, most), self.capacity)
        priority = rng.randrange(3)
        deadline = self.now + rng.random() * 60 if rng.random() < 0.1 else None
        prompt, images = self.with_images(prompt)
        session = self.sessions.choice(SESSIONS) if self.seed % 3 else None
        for _ in range(samples):
            self.last_ticket = ticket = self.last_ticket + 1
            salt = rng.choice([None, None, "tenant"]) if samples == 1 else None
            seed = ticket if samples > 1 else 0
            options = RequestOptions(
                priority=priority, cache_salt=salt, tenant=self.tenants.choice(TENANTS), session=session
            )
            right = self.executor.model.oracle(content(prompt, images), max_total - len(prompt), seed, (EOS,))
            spec = RequestSpec(
                ticket,
                tuple(prompt),
                SamplingParams(),
                max_total,
                options,
                seed=seed,
                stop_ids=(EOS,),
                arrival=self.now,
                group=first if samples > 1 else None,
                deadline=deadline,
                prediction=self.predict(right) if samples == 1 else (),
                images=images,
                inter_token_timeout=30.0 if rng.random() < 0.05 else None,
            )
            self.expected[ticket], self.received[ticket], self.prompts[ticket] = right, [], len(prompt)
            self.apply(spec)

    def with_images(self, prompt: list[int]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """`prompt` with pictures in the place of some of its tokens."""
        return prompt, ()

    def _arrive_for_a_vector(self) -> None:
        """A text to pool: whole, of all positions, or of the last one."""
        rng = self.rng
        pooled = rng.choice([Pooled(whole=True, every=True), Pooled(every=True, skip=rng.randrange(3)), Pooled()])
        text = rng.choice(self.prefixes) + [rng.randrange(2, 97) for _ in range(rng.randrange(1, 30))]
        text = text if pooled.whole else text[: self.capacity]
        self.last_ticket = ticket = self.last_ticket + 1
        options = RequestOptions(
            priority=rng.randrange(3),
            cache_salt=rng.choice([None, None, "tenant"]),
            tenant=self.tenants.choice(TENANTS),
        )
        deadline = self.now + rng.random() * 60 if rng.random() < 0.1 else None
        spec = RequestSpec(
            ticket, tuple(text), SamplingParams(), len(text), options, arrival=self.now, deadline=deadline,
            pooled=pooled,
        )  # fmt: skip
        self.expected_vectors[ticket] = fake_vector(text, pooled).tolist()
        self.expected[ticket], self.received[ticket], self.prompts[ticket] = [], [], len(text)
        self.apply(spec)

    def someone_leaves(self) -> None:
        if self.scheduler.requests and self.rng.random() < 0.05:
            self.apply(Abort(self.rng.choice(list(self.scheduler.requests))))
        if self.scheduler.requests and self.rng.random() < 0.01:
            self.apply(StopText(self.rng.choice(list(self.scheduler.requests))))
        if self.ended and self.rng.random() < 0.05:  # late news of requests that are long gone
            self.apply(Abort(self.rng.choice(list(self.ended))))

    def someone_stops_reading(self) -> None:
        """Or reads again, after a while, in every third life: who holds nothing is never in the others' way."""
        if self.seed % 3:
            return
        tickets, suspended = list(self.scheduler.requests), list(self.scheduler.roster.suspended)
        if tickets and self.readers.random() < 0.05:
            self.apply(Suspend(self.readers.choice(tickets)))
        if suspended and self.readers.random() < 0.1:
            self.apply(Resume(self.readers.choice(suspended), self.now))
        if tickets and self.readers.random() < 0.02:  # somebody who had not stopped
            self.apply(Resume(self.readers.choice(tickets), self.now))

    def someone_resets_the_cache(self) -> None:
        """All of it, or a salt's, in every fourth life, whatever runs and is in flight."""
        if self.seed % 4 == 3 and self.resets.random() < 0.02:
            self.apply(ResetPrefixCache(0, self.resets.choice([None, "", "tenant"])))

    def a_session_says_something(self) -> None:
        """In two lives of three: that it waits, that it expires by itself, or that it has ended."""
        if self.seed % 3 and self.sessions.random() < 0.1:
            what, seconds = self.sessions.choice(["open", "waiting", "close"]), self.sessions.expovariate(0.1)
            self.apply(SessionEvent(self.sessions.choice(SESSIONS[1:]), what, self.now, seconds))

    def apply(self, message: Message) -> None:
        self.recording.record("apply", message)
        self.scheduler.apply(message)

    def turn(self) -> None:
        depth = self.config.max_steps_in_flight
        batch = None
        if len(self.in_flight) < depth:
            self.recording.record("schedule", self.now)
            batch = self.scheduler.schedule(self.now)
            if batch is not None:
                self.copies += len(batch.copies)
                self.check_retire_rule(batch)
                self.in_flight.append(batch)
                if self.early:
                    self.computed.append(self.executor.execute(batch))
            self._check_books()
        if self.in_flight and (batch is None or len(self.in_flight) >= depth or self.rng.random() < 0.3):
            self.recording.record("commit", self.now)
            oldest = self.in_flight.popleft()
            result = self.computed.popleft() if self.early else self.executor.execute(oldest)
            self.before_commit(oldest, result)
            self.scheduler.commit(result, self.now)
            self._check_books()
        self.read()

    def _check_books(self) -> None:
        self._places += 1
        if self._places % self._books_every == 0:
            self.scheduler.check()

    def before_commit(self, batch: Batch, result: StepResult) -> None:
        """A hook for books of one's own."""

    def check_retire_rule(self, batch: Batch) -> None:
        """No page or state that `batch` writes, and no slot it uses, may be named by somebody else's row in flight."""
        size = self.config.page_size
        copied = {copy[::2] for copy in batch.copies}
        for earlier in self.in_flight:
            named = {(RecordType.PAGE, page) for row in earlier.rows for page in row.pages}
            named |= {(RecordType.WINDOW, page) for row in earlier.rows if row.window for page in row.window.pages}
            assert copied.isdisjoint(named), f"step {batch.step} copies onto pages that a step in flight names"
        for flying in (row for earlier in self.in_flight for row in earlier.rows):
            named = set(flying.pages[: -(-(flying.start + flying.num_scheduled) // size)])
            for row in batch.rows:
                if row.spec is flying.spec:
                    continue
                written = row.pages[row.start // size : -(-(row.start + row.num_scheduled) // size)]
                assert named.isdisjoint(written), f"step {batch.step} writes pages that a step in flight names"
                theirs = set(window_pages(flying, 0, size))
                assert theirs.isdisjoint(window_pages(row, row.start, size)), f"step {batch.step}: window pages, alike"
                assert row.slot != flying.slot, f"step {batch.step} uses a slot that a step in flight names"
                if row.state is not None and flying.state is not None:
                    ours = {row.state.slot, *(slot for _, slot in row.state.saves)}
                    theirs = {flying.state.slot, flying.state.source, *(slot for _, slot in flying.state.saves)}
                    assert ours.isdisjoint(theirs), f"step {batch.step} writes states that a step in flight names"

    def read(self) -> None:
        for output in self.scheduler.take_outputs():
            self.outputs.append(output)
            assert output.ticket not in self.ended, f"output after the end: {output}"
            if output.token >= 0:
                self.received[output.ticket].append(output.token)
            if output.vector is not None:
                assert output.reason == "stop"
                self.vectors[output.ticket] = output.vector.tolist()
            if output.reason is not None:
                self.ended[output.ticket] = output.reason

    def check_end(self) -> None:
        self.scheduler.check()
        for ticket, expected in self.expected.items():
            reason, received = self.ended.get(ticket), self.received[ticket]
            assert reason is not None, f"ticket {ticket} was lost"
            if ticket in self.expected_vectors:
                got = self.vectors.get(ticket)
                assert got == self.expected_vectors[ticket] if got else reason in ("abort", "timeout", "stop"), ticket
                continue
            if reason == "length" or (reason == "stop" and received[-1:] == [EOS]):
                assert received == expected, f"ticket {ticket}: wrong tokens"
            else:
                known = ("abort", "timeout", "stop", "error") if self.losing else ("abort", "timeout", "stop")
                assert reason in known, f"ticket {ticket} ended with {reason}"
                assert received == expected[: len(received)], f"ticket {ticket}: wrong tokens before it left"
        pages = self.scheduler.kv.counts([])
        assert (pages.free + pages.cached, pages.shared, pages.retiring) == (pages.total, 0, 0), f"leaked: {pages}"
        near = self.scheduler.kv.window_counts([])
        assert (near.free + near.cached, near.shared, near.retiring) == (near.total, 0, 0), f"leaked: {near}"
        self.scheduler.check_sums()
        assert self.scheduler.counters.left_queue == len(self.ended), "places in the queue are lost"
        states = self.scheduler.kv.state_counts([])
        assert states.free + states.snapshots == states.total, f"leaked: {states}"
        sessions = self.scheduler.roster.sessions._branches.values()
        known = {(tip, owner) for owner in sessions for tip in owner.tips}
        assert known == {(node, each) for node in self.scheduler.kv.tree.nodes() for each in node.tips}
        for name in SESSIONS[1:]:
            self.scheduler.apply(SessionEvent(name, "close"))
        cached = list(self.scheduler.kv.tree.nodes())
        assert not any(node.tips for node in cached), "a session has ended, and has branches"
        if not self.windowed:
            assert all(node.passed for node in cached if node.private), "a page that no session wants is kept"
        if not self.config.prefix_caching:
            assert not states.snapshots, "nobody can find these"

    def counts(self) -> Counter[str]:
        """Counts of what the life contained, its ends by their reasons: a fuzz that never preempts proves nothing about
        preemption."""
        counters, states = self.scheduler.counters, self.scheduler.kv.state_counts([])
        whole = self.scheduler.kv.pool.capacity * self.config.page_size
        found = Counter(
            requests=len(self.expected),
            preemptions=counters.preemptions,
            cached_tokens=counters.cached_tokens,
            beyond_the_pool=sum(len(self.received[ticket]) + length > whole for ticket, length in self.prompts.items()),
            state_hits=states.hits,
            state_evictions=states.evictions,
            copies=self.copies,
            depth2=self.config.max_steps_in_flight == 2,
            windowed=self.windowed,
            vectors=len(self.vectors),
        )
        if self.scheduler.roster.drafts is not None:
            assert not self.scheduler.roster.drafts.requests
            drafts = self.scheduler.roster.drafts.counters
            found.update(accepted=drafts.accepted, refused=drafts.drafted - drafts.accepted)
            rows = [row for batch in self.executor.executed for row in batch.rows if row.drafts]
            found.update(behind_prompts=sum(row.start < len(row.spec.prompt) for row in rows))
        return found + Counter(self.ended.values())
