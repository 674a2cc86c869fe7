"""What penalized requests have seen, counted once whatever happens."""

from __future__ import annotations

import pytest
import torch
from support.device_modes import DEVICE, FailOnce, NoWaiting

from asyncengine.request_spec import RequestSpec
from asyncengine.sampling.penalties import PenaltyTable
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row

VOCAB = 20
TOKENS = [3, 4, 4, 7, 7, 9]
"""Three of the prompt, three of the output."""


def row(in_flight: bool, num_prompt: int = 3) -> Row:
    """All of `TOKENS` in one step, and behind them a token that only the device knows."""
    spec = RequestSpec(1, tuple(TOKENS[:num_prompt]), SamplingParams(repetition_penalty=1.2), 64)
    return Row(spec, 2, 0, len(TOKENS) + in_flight, TOKENS, in_flight, [1], True)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_count_that_runs_out_of_memory_is_taken_up_again(in_flight: bool) -> None:
    last = torch.tensor([0, 0, 9, 0])
    asked = row(in_flight)
    counting, table = FailOnce(0), PenaltyTable(4, VOCAB, torch.device("cpu"))
    with counting:
        prompt, output = table.seen(asked, last)
    assert prompt.nonzero()[:, 0].tolist() == [3, 4]
    assert {token: int(output[token]) for token in output.nonzero()[:, 0].tolist()} == {7: 2, 9: 1 + in_flight}
    for at in range(1, counting.seen + 1):
        table = PenaltyTable(4, VOCAB, torch.device("cpu"))
        with pytest.raises(torch.OutOfMemoryError), FailOnce(at):
            table.seen(asked, last)
        found = table.seen(asked, last)
        assert torch.equal(found[0], prompt)
        assert torch.equal(found[1], output), f"after a failure of operation {at} of {counting.seen}"


def test_counting_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PenaltyTable(4, VOCAB, DEVICE)
    with NoWaiting(monkeypatch) as mode:
        table.seen(row(True), torch.empty(4, dtype=torch.int64, device=DEVICE))
    assert mode.copies == 2
