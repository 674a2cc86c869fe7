"""A fleet whose lines break, and one that has none. Without Ray: see `support.local_fleet`."""

from __future__ import annotations

import asyncio

import pytest
from support.local_fleet import local_fleet

from asyncengine import SamplingParams
from asyncengine.cluster.fleet.replica import Replica

TEXTS = [f"Question {number}: what is the capital of the country numbered {number * 7}?" for number in range(12)]
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)


async def test_a_line_that_breaks_between_two_who_live_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was on its way arrives over the next one, once."""
    fleet, carrier = await local_fleet(monkeypatch, replicas=2)
    async with fleet:
        right = {text: (await fleet.generate(text, SAMPLED)).token_ids for text in TEXTS}
        streams = {text: fleet.stream(text, SAMPLED) for text in TEXTS}
        found: dict[str, list[int]] = {text: [] for text in TEXTS}

        cuts = chunks = 0

        async def read(text: str) -> None:
            nonlocal cuts, chunks
            async for chunk in streams[text]:
                found[text] += chunk.token_ids
                chunks += 1
                if chunks % 5 == 1:  # as fast as the answers come, and no faster
                    cuts += sum([await host.cut() for host in carrier.hosts.values()])

        await asyncio.gather(*(read(text) for text in TEXTS))
        assert cuts
        assert found == right
        assert fleet.stats().lost == 0
        assert all(host.link.has_line for host in carrier.hosts.values())


@pytest.mark.parametrize("refusal", ["no port", "nobody there"])
async def test_where_no_line_can_be_made_ray_carries_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    """From the first order on, which was given while the line was being made."""

    async def line(replica: Replica, address: str, token: bytes) -> int:
        if refusal == "no port":
            raise PermissionError("no ports here")
        return 1

    with_lines, _ = await local_fleet(monkeypatch, replicas=1)
    async with with_lines:
        right = [(await with_lines.generate(text, SAMPLED)).token_ids for text in TEXTS]
    monkeypatch.setattr(Replica, "line", line)
    fleet, carrier = await local_fleet(monkeypatch, replicas=2)
    async with fleet:
        answers = await asyncio.gather(*(fleet.generate(text, SAMPLED) for text in TEXTS))
        assert [answer.token_ids for answer in answers] == right
        assert caplog.text.count("Ray carries all") == 2
        assert not any(host.link.has_line for host in carrier.hosts.values())
