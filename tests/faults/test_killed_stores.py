"""Processes that keep prefixes on a disk and are killed at any moment: whoever comes next gets the same answers.

`ASYNCENGINE_LONG=200` kills so many.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from support import forked
from support.forked import Program
from support.long import TIMES

KILLS = TIMES
KINDS = 1 if KILLS < 10 else 13
"""Sets of prompts, of which each is answered once without a store."""
SERVE = """
import asyncio, json, sys
from asyncengine import AsyncEngine, SamplingParams
from asyncengine.engine import prefix_store

prefix_store._WORTH, prefix_store._LEAST_PATIENCE = 1e9, 100.0
PARAMS = SamplingParams(max_tokens=3, temperature=0, logprobs=True, ignore_eos=True)

async def main(folder, number):
    settings = {"kv_cache_dir": folder} if folder else {}
    async with await AsyncEngine.from_pretrained(
        "demo", dtype="float32", num_threads=1, show_progress=False, kv_cache_disk="8MiB", **settings
    ) as engine:
        for turn in range(12):
            head = [100 + (7 * place + turn % 4) % 300 for place in range(200)]
            prompt = [*head, *range(200, 200 + (turn * 5 + number) % 13)]
            answer = await engine.generate(prompt, PARAMS)
            scores = [(each.token_id, each.logprob) for each in answer.logprobs]
            print(json.dumps([prompt, scores, answer.usage.restored_tokens]), flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def start(folder: Path | None, number: int) -> Program:
    return forked.start(SERVE, "" if folder is None else str(folder), str(number))


def answers(process: Program, most: int = 100) -> list[tuple[str, str, int]]:
    """Up to so many answers: prompt, scores, restored tokens."""
    assert process.stdout is not None
    found = []
    while len(found) < most and (line := process.stdout.readline()):
        prompt, scores, restored = json.loads(line)
        found.append((json.dumps(prompt), json.dumps(scores), restored))
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_processes_leave_no_wrong_prefix(tmp_path: Path) -> None:
    rng = random.Random(1)
    expected: dict[str, str] = {}
    restored = 0
    for number in range(KILLS):
        if number < KINDS:
            fresh = start(None, number)
            expected.update({prompt: scores for prompt, scores, _ in answers(fresh)})
            assert fresh.wait() == 0
        process = start(tmp_path, number % KINDS)
        found = answers(process, rng.randrange(13))  # then it may be writing
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for prompt, scores, count in found:
            assert scores == expected[prompt]
            restored += count
    for _ in range(2):  # the first may find nothing, and leaves all it computed
        last = start(tmp_path, 0)
        found = answers(last)
        assert last.wait() == 0
        assert all(scores == expected[prompt] for prompt, scores, _ in found)
    assert restored + sum(count for _, _, count in found) > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 9 * 2**20


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    both = [start(tmp_path, 0) for _ in range(2)]
    one, other = (answers(process) for process in both)
    assert [each[:2] for each in one] == [each[:2] for each in other]
    assert [process.wait() for process in both] == [0, 0]
    again = start(tmp_path, 0)
    assert answers(again, 1)[0] == (*one[0][:2], 192)
    again.kill()
    again.wait()
    assert again.stdout is not None
    again.stdout.close()
