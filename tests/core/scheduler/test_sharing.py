"""Work that is done once: prefixes shared by simultaneous requests, prompts shared by n samples."""

import pytest
from support.fake_engine import Steps


@pytest.mark.parametrize("budget", [64, 256, 1024, 8192])
def test_a_prefix_shared_by_simultaneous_requests_is_computed_once(budget: int):
    prefix = [2 + i % 90 for i in range(1024)]
    steps = Steps(pages=2000, page_size=16, max_num_batched_tokens=budget, max_num_seqs=64)
    for i in range(32):
        steps.add([*prefix, 5 + i, 6], 4)
    steps.run()
    steps.assert_right()
    prompt_tokens = 1024 + 32 * 2
    decodes = 32 * 3
    assert steps.scheduler.counters.computed_tokens == prompt_tokens + decodes
    assert steps.scheduler.counters.cached_tokens == 31 * 1024
