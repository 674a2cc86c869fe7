"""`asyncengine demo --fleet N`: the bundled model in N processes behind one engine's methods, in three scenes."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncengine.cli.documents import ABOUT_ARCHIVE, ARCHIVE, SMALL_JOBS
from asyncengine.cli.show import Line, Show, answer
from asyncengine.config import EngineConfig
from asyncengine.sampling_params import SamplingParams

LONG = SamplingParams(temperature=1.0, seed=7, max_tokens=400, ignore_eos=True)
STORIES = 12


async def story(show: Show, config: EngineConfig, model: str, replicas: int, streams: int) -> dict[str, Any]:
    """Play it. Raises `FleetError` where no process can be started."""
    from asyncengine.cluster.fleet import Fleet

    with show.busy(f"starting {replicas} processes with the model"):
        fleet = await Fleet.from_pretrained(model, config=config, replicas=replicas, address="local", on_loss="resume")
    async with fleet:
        show.print(f"[bold]asyncengine[/bold] has loaded its bundled model into {replicas} processes of this machine.")
        lines = [Line(SMALL_JOBS[index % len(SMALL_JOBS)]) for index in range(streams)]
        title = f"1  {streams} streams over {replicas} replicas"
        caption = "Each goes where there is least to do."
        many = await show.scene(title, caption, lines, lambda line: answer(fleet, line))
        shares = [sum(stats.finished.values()) for stats in (await fleet.replica_stats()).values()]
        show.outcome(f"The replicas answered {', '.join(map(str, shares))} of them.", lines)

        show.title("2  A prefix is computed once", "Questions about one text go where its keys and values are.")
        about = [Line(question) for question in ABOUT_ARCHIVE[:6]]
        cached = [(await answer(fleet, line, ARCHIVE)).cached_tokens for line in about]
        show.print(f"[green]→[/green] Prompt tokens found in a cache: {', '.join(map(str, cached))}.")

        show.title("3  A replica is killed", f"{STORIES} long answers are under way. Those of the lost one go on.")
        texts = [f"Tell me a story about a cat named Lio{index}." for index in range(STORIES)]
        undisturbed = await asyncio.gather(*(fleet.generate(text, LONG) for text in texts))
        begun = [fleet.stream(text, LONG) for text in texts]
        for stream in begun:
            await anext(stream)
        killed = await fleet.kill_one()
        ended = await asyncio.gather(*(stream.result() for stream in begun))
        same = sum(one.token_ids == other.token_ids for one, other in zip(undisturbed, ended, strict=True))
        loss = {"resumed": fleet.stats().resumed, "same": same, "of": STORIES}
        result = "{resumed} answers went on elsewhere; {same} of {of} are, token for token, what they are undisturbed."
        show.print(f"[green]→[/green] {killed} is gone. {result.format_map(loss)}")
        streamed, prefixes = {**many, "shares": shares}, {"cached_tokens": cached}
        return {"replicas": replicas, "streams": streamed, "prefixes": prefixes, "loss": loss}
