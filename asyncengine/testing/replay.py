"""Record the inputs of an engine's scheduler, and replay them without an event loop.

A scheduler is deterministic: the same messages, clock readings and step results give the same batches. So a recording
of its inputs is a complete account of a run, whatever tasks, threads and cancellations produced it. A fuzz failure
saves one; replaying it under a debugger shows the failure again, step by step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from asyncengine.config import EngineConfig
from asyncengine.grammar import Grammar
from asyncengine.grammar.narrowing import BadWords, Narrowing
from asyncengine.grammar.thinking import ThinkingBudget
from asyncengine.images import ImageSpan, PromptImage
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.radix_tree import Window
from asyncengine.options import RequestOptions
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.scheduler import Output, Scheduler, messages
from asyncengine.scheduler.restores import RestoreOrder
from asyncengine.seams import AdapterAdmission, Executor, GrammarMatcher
from asyncengine.step import StepResult

_MESSAGES: dict[str, Any] = {message.__name__: message for message in get_args(messages.Message)}


@dataclass(slots=True)
class Recording:
    """Inputs of one scheduler, in order. Pass `record` as an engine's `recorder`."""

    config: EngineConfig
    num_pages: int
    entries: list[tuple[str, Any]] = field(default_factory=list)
    """("apply", message), ("schedule", now), ("commit", now), ("start_anew", number), ("pause", number),
    ("resume", None), ("clear_cache", None) or ("end_all", reason)."""
    num_states: int = 0
    """Slots for recurrent states, slot 0 included; 0: the model keeps none."""
    windows: tuple[Window, ...] = ()
    """Kinds of the model's attention layers."""
    num_window_pages: int = 0
    """Pages of those with windows, page 0 included; 0: all layers have the same."""
    copies: bool = True
    """Whether its executor made `Batch.copies`, as those of one process on a CPU do."""

    def record(self, kind: str, value: object) -> None:
        self.entries.append((kind, value))

    def save(self, path: str | Path) -> Path:
        """Write as JSON lines. Grammars are saved, matchers are not: `replay` makes them anew. Errors become their
        texts. Raises `TypeError` for a grammar that is not a `Grammar`, and for a policy that has no name alone."""
        path = Path(path)
        lines = [json.dumps(asdict(replace(self, entries=[])))]
        for event, value in self.entries:
            lines.append(json.dumps([event, value if event != "apply" else _message_to_json(value)]))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        head, *lines = Path(path).read_text(encoding="utf-8").splitlines()
        fields = {"windows": (), "copies": False, **json.loads(head)}  # 0.1 had none
        fields["config"] = EngineConfig(**{"step_time_target": None, **fields["config"]})  # 0.2 had none
        fields["windows"] = tuple(map(tuple, fields["windows"]))
        recording = cls(**fields)
        for event, value in _updated(map(json.loads, lines)):
            recording.record(event, _message_from_json(value) if event == "apply" else value)
        return recording


def replay(
    recording: Recording, executor: Executor, adapters: AdapterAdmission | None = None,
    matchers: Callable[[RequestSpec], GrammarMatcher] | None = None, update: Callable[[int], None] | None = None,
    restore: Callable[[RestoreOrder], None] | None = None,
) -> list[Output]:  # fmt: skip
    """Play a recording on a fresh scheduler and `executor`; all outputs, in order. Books are checked after each entry.

    The executor must answer as the recorded one did (a fake one does; a real model does up to its arithmetic). So must
    `adapters`, if the recorded scheduler had any. Each constrained request gets a fresh matcher: the recorded run used
    its own up, and a recording can be played any number of times. `matchers` makes those of a loaded recording,
    `update` gives the executor the weights of the update of a number, `restore` puts into its pages what a disk had, or
    a file, where prefixes came from one.
    """
    config = recording.config
    kv = KVCache(
        recording.num_pages, executor.page_size, prefix_caching=config.prefix_caching, eviction=config.eviction,
        num_states=recording.num_states, windows=recording.windows, num_window_pages=recording.num_window_pages,
        most_ahead=config.most_ahead,
    )  # fmt: skip
    scheduler = Scheduler(config, kv, adapters, copies=recording.copies)
    scheduler.restores.enabled = any(isinstance(value, messages.PrefixFound) for _, value in recording.entries)
    launched: deque[StepResult] = deque()
    outputs: list[Output] = []
    asked: dict[int, RequestSpec] = {}
    for event, value in recording.entries:
        if event == "apply":
            if isinstance(value, RequestSpec):
                asked[value.ticket] = value
            scheduler.apply(_with_matcher(value, asked, matchers))
            for order in scheduler.restores.take_orders():
                assert restore is not None
                restore(order)
        elif event == "schedule":
            batch = scheduler.schedule(value)
            if batch is not None:
                launched.append(executor.launch(batch).wait())
        elif event == "commit":
            scheduler.commit(launched.popleft(), value)
        elif event in ("resume", "clear_cache"):
            getattr(scheduler, event)()
        elif event in ("end_all", "pause", "start_anew"):
            getattr(scheduler, event)(value)
            if event == "start_anew" and update is not None:
                update(value)
        scheduler.check()
        outputs += scheduler.take_outputs()
    return outputs


def _with_matcher(
    message: messages.Message,
    asked: Mapping[int, RequestSpec],
    matchers: Callable[[RequestSpec], GrammarMatcher] | None,
) -> messages.Message:
    """`message`; if it brings a matcher, with a fresh one."""
    if not isinstance(message, messages.GrammarReady) or message.error is not None:
        return message
    if message.matcher is not None:
        return message._replace(matcher=message.matcher.fresh())
    if matchers is None:
        raise ValueError("this recording was saved without its matchers: pass `matchers` to make them")
    return message._replace(matcher=matchers(asked[message.ticket]))


def _message_to_json(message: messages.Message) -> list[Any]:
    if isinstance(message, RequestSpec):  # without pixels, which a scheduler does not read
        images = [
            [*span, image.digest.hex(), image.tokens, image.nbytes, image.grid] for image, *span in message.images
        ]
        return [type(message).__name__, {**asdict(message), "images": images}]
    if isinstance(message, messages.GrammarReady | messages.AdapterReady) and message.error is not None:
        message = message._replace(error=str(message.error))
    if isinstance(message, messages.GrammarReady):
        message = message._replace(matcher=None)
    if isinstance(message, messages.PrefixFound):
        message = message._replace(read=None)
    return [type(message).__name__, message._asdict()]


def _span_from_json(value: list[Any]) -> ImageSpan:
    *span, digest, tokens, nbytes, grid = value
    return ImageSpan(PromptImage(bytes.fromhex(digest), tokens, nbytes, dict, grid and tuple(grid)), *span)


def _message_from_json(value: list[Any]) -> messages.Message:
    name, fields = value
    if name == RequestSpec.__name__:
        params = fields["params"]
        params["grammar"] = _grammar_from_json(params["grammar"])
        fields["params"] = SamplingParams(**params)
        fields["options"] = RequestOptions(**fields["options"])
        for key in ("prompt", "stop_ids", "prediction", "resumed"):
            fields[key] = tuple(fields.get(key, ()))
        fields["images"] = tuple(map(_span_from_json, fields.get("images", ())))
        if fields.get("pooled") is not None:
            fields["pooled"] = Pooled(**fields["pooled"])
    return _MESSAGES[name](**fields)


def _grammar_from_json(fields: dict[str, Any] | None) -> Grammar | Narrowing | None:
    if fields is None or "grammar" not in fields:
        return None if fields is None else Grammar(**fields)
    inner = _grammar_from_json(fields.pop("grammar"))
    return (BadWords if "words" in fields else ThinkingBudget)(**fields, grammar=inner)


def _updated(entries: Iterable[list[Any]]) -> Iterator[tuple[str, Any]]:
    """The entries that say the same today: 0.1 saved `Generate` messages, in pieces, which named the digest of their
    adapter."""
    digests: dict[int, str] = {}
    for event, value in entries:
        name, fields = value if event == "apply" else ("", {})
        if name == "AdapterReady" and "digest" not in fields:
            fields["digest"] = digests.get(fields["ticket"], "")
        if name != "Generate":
            yield event, value
            continue
        spec = fields.pop("spec")
        ticket, digest, loading = spec["ticket"], fields.pop("adapter"), fields.pop("adapter_loading")
        options = {"adapter": digest or None, "priority": fields.pop("priority"), "cache_salt": fields.pop("salt")}
        del spec["prompt_len"], fields["needs_grammar"]
        digests[ticket] = digest
        yield event, [RequestSpec.__name__, {**spec, **fields, "options": options}]
        if digest and not loading:  # it was there already
            yield event, ["AdapterReady", {"ticket": ticket, "digest": digest}]
