"""A recording that 0.1 saved can still be played: requests in pieces, adapters by digest."""

from __future__ import annotations

from pathlib import Path

from support.plug_points import Letters

from asyncengine.grammar import Grammar
from asyncengine.lora.admission import AdapterSlots
from asyncengine.request_spec import RequestSpec
from asyncengine.testing import FakeExecutor, FakeModel, Recording, replay

FILE = Path(__file__).with_name("recorded_by_0_1.jsonl")
"""Two requests of one prompt, with an adapter that is loading and with one that is there; two samples of another, one
with a deadline; one with a grammar; one whose adapter cannot be loaded."""
ANSWERED = {
    1: ([90, 28, 18, 48], "length"), 2: ([90, 28, 18, 48], "length"), 3: ([85, 46, 62, 28], "length"),
    4: ([], "timeout"), 5: ([10, 10, 10], "stop"), 6: ([], "error"),
}  # fmt: skip


def test_a_recording_of_0_1_replays_to_the_outputs_it_had(tmp_path: Path) -> None:
    recording = Recording.load(FILE)
    specs = {value.ticket: value for kind, value in recording.entries if isinstance(value, RequestSpec)}
    assert (specs[1].options.cache_salt, specs[2].options.priority, specs[4].group, specs[4].deadline) == (
        "tenant", 2, 3, 2.5,
    )  # fmt: skip
    assert specs[5].params.grammar == Grammar.regex("[ab]{3}")
    for entries in (recording, Recording.load(recording.save(tmp_path / "saved anew.jsonl"))):
        got: dict[int, tuple[list[int], str]] = {}
        executor = FakeExecutor(32, 4, FakeModel())
        for output in replay(entries, executor, AdapterSlots(1), lambda spec: Letters([10, 11], 3)):
            tokens, reason = got.get(output.ticket, ([], ""))
            got[output.ticket] = (tokens + [output.token] * (output.token >= 0), output.reason or reason)
        assert got == ANSWERED
