"""Tokens that penalized requests have seen are counted once, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.device_modes import FailOnce

from asyncengine.execution.sampling.logit_processors import PenaltyTable
from asyncengine.request_spec import RequestSpec
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


def test_a_kernel_counts_what_comes_token_by_token_and_nothing_else() -> None:
    """It is asked to count a token of the output that follows all that is counted; else the row is counted here."""
    table, asked = PenaltyTable(4, VOCAB, torch.device("cpu")), row(False)
    slots, prompts = np.array([2]), np.array([3])

    def ready(position: int) -> bool:
        addresses, counted = table.counting(slots, np.array([position]), prompts)
        known = table.states.get(asked.slot)
        assert known is None or addresses[1, 0] == known.output_counts.data_ptr()
        return bool(counted[0])

    assert not ready(7), "nobody has counted"
    table.seen(asked, torch.zeros(4, dtype=torch.int64))
    assert not ready(6), "it is counted, and the step is launched again"
    assert not ready(8), "one was counted by nobody"
    assert ready(7)
    assert ready(8)
    assert not ready(8)
    table.forget(2)
    assert not ready(9)
    table.seen(asked._replace(num_scheduled=3), torch.zeros(4, dtype=torch.int64))
    assert not table.counting(slots, np.array([4]), np.array([4]))[1][0], "the last token of a prompt"
