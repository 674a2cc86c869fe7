"""A fleet whose connections break, and one that has none. Without Ray: see `support.local_fleet`."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import until
from support.local_fleet import local_fleet

from asyncengine import SamplingParams
from asyncengine.cluster.fleet.replica import Replica

zmq = pytest.importorskip("zmq", reason='needs pyzmq: pip install "asyncengine[cluster]"')

TEXTS = [f"Question {number}: what is the capital of the country numbered {number * 7}?" for number in range(12)]
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)


async def test_a_connection_that_breaks_between_two_who_live_is_a_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell what was lost with it. Its streams go on elsewhere, and what is left of it is ended."""
    fleet, carrier = await local_fleet(monkeypatch, replicas=2, on_loss="resume")
    async with fleet:
        right = {text: (await fleet.generate(text, SAMPLED)).token_ids for text in TEXTS}
        carrier.hold(after=3)
        streams = {text: fleet.stream(text, SAMPLED) for text in TEXTS}
        for stream in streams.values():
            await stream.__aenter__()
        members = fleet.door.fleet.crew.members
        await until(lambda: sum(len(member.flights) for member in members.values()) == len(TEXTS), "all on their way")
        cut = carrier.hosts[max(members.values(), key=lambda member: len(member.flights)).name]
        await until(lambda: cut.held is not None and cut.held.reached.is_set(), "answers in the middle")
        cut.cut()
        carrier.release()
        assert {text: (await stream.result()).token_ids for text, stream in streams.items()} == right
        assert fleet.stats().lost == 1
        assert fleet.stats().resumed > 0
        await until(lambda: cut.killed and len(members) == 2, "a replacement")


@pytest.mark.parametrize("refusal", ["no port", "nobody there"])
async def test_where_no_line_can_be_made_ray_carries_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    """From the first order on, which was given while the connection was being made."""

    async def listen(replica: Replica, address: str, door_key: bytes) -> tuple[int, bytes]:
        if refusal == "no port":
            raise PermissionError("no ports here")
        return 1, zmq.curve_keypair()[0]

    with_lines, _ = await local_fleet(monkeypatch, replicas=1)
    async with with_lines:
        right = [(await with_lines.generate(text, SAMPLED)).token_ids for text in TEXTS]
    monkeypatch.setattr(Replica, "listen", listen)
    fleet, carrier = await local_fleet(monkeypatch, replicas=2)
    async with fleet:
        answers = await asyncio.gather(*(fleet.generate(text, SAMPLED) for text in TEXTS))
        assert [answer.token_ids for answer in answers] == right
        assert caplog.text.count("Ray carries all") == 2
        assert all("deliveries by Ray" in host.calls for host in carrier.hosts.values())
