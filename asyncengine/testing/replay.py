"""Record what an engine was told, and play it again without an event loop.

A scheduler is deterministic: the same messages, clock readings and step results give the same batches. So a recording
of its inputs is a complete account of a run, whatever tasks, threads and cancellations produced it. A fuzz failure
saves one; replaying it under a debugger shows the failure again, step by step.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncengine.batch import RowSpec, StepResult
from asyncengine.config import EngineConfig
from asyncengine.kvcache import KVCache
from asyncengine.messages import Abort, AdapterReady, Drain, Generate, GrammarReady, Message, StopText
from asyncengine.protocols import Executor
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler import Output, Scheduler

_MESSAGES: dict[str, Any] = {
    kind.__name__: kind for kind in (Generate, Abort, StopText, GrammarReady, AdapterReady, Drain)
}


@dataclass(slots=True)
class Recording:
    """Inputs of one scheduler, in order. Pass `record` as an engine's `recorder`."""

    config: EngineConfig
    num_pages: int
    entries: list[tuple[str, Any]] = field(default_factory=list)
    """("apply", message), ("schedule", now) or ("commit", now)."""

    def record(self, kind: str, value: object) -> None:
        self.entries.append((kind, value))

    def save(self, path: str | Path) -> Path:
        """Write as JSON lines. Grammar matchers are code and cannot be saved: raises `TypeError` for those."""
        path = Path(path)
        lines = [json.dumps({"config": asdict(self.config), "num_pages": self.num_pages})]
        for kind, value in self.entries:
            lines.append(json.dumps([kind, value if kind != "apply" else _message_to_json(value)]))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        head, *lines = Path(path).read_text(encoding="utf-8").splitlines()
        fields = json.loads(head)
        recording = cls(EngineConfig(**fields["config"]), fields["num_pages"])
        for line in lines:
            kind, value = json.loads(line)
            recording.record(kind, _message_from_json(value) if kind == "apply" else value)
        return recording


def replay(recording: Recording, executor: Executor) -> list[Output]:
    """Play a recording on a fresh scheduler and `executor`; all outputs, in order. Books are checked after each entry.

    The executor must answer as the recorded one did (a fake one does; a real model does up to its arithmetic).
    """
    config = recording.config
    kv = KVCache(
        recording.num_pages, executor.page_size, prefix_caching=config.prefix_caching, eviction=config.eviction
    )
    scheduler = Scheduler(config, kv)
    launched: deque[StepResult] = deque()
    outputs: list[Output] = []
    for kind, value in recording.entries:
        if kind == "apply":
            scheduler.apply(value)
        elif kind == "schedule":
            batch = scheduler.schedule(value)
            if batch is not None:
                launched.append(executor.execute(batch))
        elif kind == "commit":
            scheduler.commit(launched.popleft(), value)
        elif kind == "end_all":
            scheduler.end_all(value)
        scheduler.check()
        outputs += scheduler.take_outputs()
    return outputs


def _message_to_json(message: Message) -> list[Any]:
    if isinstance(message, GrammarReady) and message.matcher is not None:
        raise TypeError("a recording with grammar matchers cannot be saved")
    return [type(message).__name__, asdict(message)]


def _message_from_json(value: list[Any]) -> Message:
    name, fields = value
    if name == "Generate":
        spec = fields["spec"]
        spec["params"] = SamplingParams(**spec["params"])
        spec["stop_ids"] = tuple(spec["stop_ids"])
        fields["spec"] = RowSpec(**spec)
        fields["prompt"] = tuple(fields["prompt"])
    message: Message = _MESSAGES[name](**fields)
    return message
