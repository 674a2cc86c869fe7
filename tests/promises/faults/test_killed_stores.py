"""Processes that keep prefixes on a disk and are killed at any moment: whoever comes next gets the same answers.

`ASYNCENGINE_LONG=200` kills so many.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import AsyncIterator
from inspect import getsource
from pathlib import Path

import pytest
from support import forked
from support.forked import Program
from support.long import TIMES

from asyncengine.engine import prefix_store

KILLS = TIMES
KINDS = 1 if KILLS < 10 else 13
"""Sets of prompts, of which each is answered once without a store."""
Answer = tuple[str, str, int]
"""A prompt, its answer's scores, and the tokens that were restored from a store."""


async def serve(folder: str, number: int) -> AsyncIterator[Answer]:
    """Twelve answers in turn, of an engine that keeps its prefixes in `folder`, or nowhere ("")."""
    from asyncengine import AsyncEngine, SamplingParams
    from asyncengine.engine import prefix_store

    prefix_store.WORTH, prefix_store.LEAST_PATIENCE = 1e9, 100.0
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=True, ignore_eos=True)
    settings = {"kv_cache_dir": folder} if folder else {}
    if number % 2:  # of which 12 prompts evict the most
        settings |= {"kv_cache_write": "on_eviction", "kv_cache_memory": "2MiB"}
    async with await AsyncEngine.from_pretrained(
        "demo", dtype="float32", num_threads=1, show_progress=False, kv_cache_disk="8MiB", **settings
    ) as engine:
        for turn in range(12):
            head = [100 + (7 * place + turn % 4) % 300 for place in range(200)]
            prompt = [*head, *range(200, 200 + (turn * 5 + number) % 13)]
            answer = await engine.generate(prompt, params)
            scores = [(each.token_id, each.logprob) for each in answer.logprobs]
            yield json.dumps(prompt), json.dumps(scores), answer.usage.restored_tokens


SERVE = f"""
from __future__ import annotations
import asyncio, json, sys
{getsource(serve)}
async def main():
    async for answer in serve(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(answer), flush=True)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` changes these in this process, too."""
    for name in ("WORTH", "LEAST_PATIENCE"):
        monkeypatch.setattr(prefix_store, name, getattr(prefix_store, name))


async def served(folder: str, number: int) -> list[Answer]:
    """The answers of an engine in this process."""
    return [answer async for answer in serve(folder, number)]


def start(folder: Path, number: int) -> Program:
    return forked.start(SERVE, str(folder), str(number))


def answers(process: Program, most: int = 100) -> list[Answer]:
    """Answers of a process, `most` at most."""
    assert process.stdout is not None
    found: list[Answer] = []
    while len(found) < most and (line := process.stdout.readline()):
        prompt, scores, restored = json.loads(line)
        found.append((prompt, scores, restored))
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
async def test_killed_processes_leave_no_wrong_prefix(tmp_path: Path) -> None:
    rng = random.Random(1)
    expected: dict[str, str] = {}
    restored = 0
    for number in range(KILLS):
        if number < KINDS:
            expected.update({prompt: scores for prompt, scores, _ in await served("", number)})
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
        found = await served(str(tmp_path), 0)
        assert all(scores == expected[prompt] for prompt, scores, _ in found)
    assert restored + sum(count for _, _, count in found) > 0
    assert sum(entry.stat().st_size for entry in os.scandir(tmp_path)) < 9 * 2**20


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
async def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    both = [start(tmp_path, 0) for _ in range(2)]
    one, other = (answers(process) for process in both)
    assert [each[:2] for each in one] == [each[:2] for each in other]
    assert [process.wait() for process in both] == [0, 0]
    assert (await served(str(tmp_path), 0))[0] == (*one[0][:2], 192)
