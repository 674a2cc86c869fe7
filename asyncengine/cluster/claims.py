"""The claim of a model: what it needs of a cluster, and where it may go. Plain data, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncengine.checks import as_integer, as_items, as_number
from asyncengine.cluster.nodes import MAX_CPUS, MAX_DEVICES, MAX_TOTAL, Pairs, as_memory, as_name, as_pairs
from asyncengine.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The needs of one instance of a model. At least one of `device_bytes` and `cpu_bytes` is given.

    Raises `InvalidParameter` naming the field.
    """

    model: str
    """Its name: instances of the same are spread, and nodes with its files preferred."""
    device_bytes: int | None = None
    """Memory over all its devices: weights, KV cache and what a step takes. None: it runs on no device."""
    cpu_bytes: int | None = None
    """Host memory of an instance that runs on the host's processors. None: it cannot."""
    copied_bytes: int = 0
    """The part of `device_bytes` of which each of several devices has a copy, as of what a step takes; the rest is
    divided evenly."""
    host_bytes: int = 0
    """Host memory beside devices, on each of its nodes."""
    cpus: float = 0.0
    """Logical CPUs, on each of its nodes."""
    utilization: float = 0.0
    """0: it takes its share of `device_bytes` of each device. Above 0, the share of each device that it takes whatever
    it needs, as vLLM does (gpu_memory_utilization): only devices of which so much is free are considered."""
    devices: int | None = None
    """Number of devices; None: as few as suffice."""
    split: tuple[int, ...] = ()
    """Numbers that its devices on one node must divide: attention heads, vocabulary."""
    several_nodes: bool = False
    """True: it may span nodes."""
    cluster: str | None = None
    labels: Pairs = ()
    """Labels that a node must have."""
    on: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Only these devices: {node: [indices]}. Empty: any."""
    backend: str | None = None
    version: str | None = None
    """Version of the backend; None: any."""
    path: str | None = None
    """A local path that must exist on its nodes."""
    draft: str | None = None
    """Draft model of speculation, whose files a node should have, too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", as_name("model", self.model))
        for field in ("device_bytes", "cpu_bytes"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, as_memory(field, getattr(self, field), 1, MAX_TOTAL))
        if self.device_bytes is None and self.cpu_bytes is None:
            raise InvalidParameter("device_bytes", "must be given where cpu_bytes is not")
        most = 0 if self.device_bytes is None else self.device_bytes
        object.__setattr__(self, "copied_bytes", as_memory("copied_bytes", self.copied_bytes, high=most))
        object.__setattr__(self, "host_bytes", as_memory("host_bytes", self.host_bytes))
        object.__setattr__(self, "cpus", as_number("cpus", self.cpus, 0.0, MAX_CPUS))
        object.__setattr__(self, "utilization", as_number("utilization", self.utilization, 0.0, 1.0))
        if self.devices is not None:
            object.__setattr__(self, "devices", as_integer("devices", self.devices, 1))
        split = tuple(as_integer("split", number, 1) for number in as_items("split", self.split))
        object.__setattr__(self, "split", split)
        if not isinstance(self.several_nodes, bool):
            raise InvalidParameter("several_nodes", "must be True or False", self.several_nodes)
        object.__setattr__(self, "labels", as_pairs("labels", self.labels))
        object.__setattr__(self, "on", _as_selection(self.on))
        for field in ("cluster", "backend", "version", "path", "draft"):
            if getattr(self, field) is not None:
                as_name(field, getattr(self, field))
        if self.version is not None and self.backend is None:
            raise InvalidParameter("version", "is of a backend: name that, too", self.version)

    def divides(self, devices: int) -> bool:
        """Tell whether the model can be split over so many devices of a node."""
        return all(number % devices == 0 for number in self.split)

    def part(self, devices: Any) -> Any:
        """Bytes of each of so many devices: an integer, or an array of them."""
        assert self.device_bytes is not None
        return self.copied_bytes - (self.copied_bytes - self.device_bytes) // devices

    def whole(self, part: Any, devices: Any) -> Any:
        """The largest `device_bytes`, all else being equal, of which each of so many devices has at most `part`; less
        than `copied_bytes`: none."""
        return self.copied_bytes + (part - self.copied_bytes) * devices


def rule_of_thumb(weight_bytes: int) -> int:
    """`device_bytes` of a language model of which nothing is known but its weights: 1.2 times these and 2 GiB.

    GPUStack's rule; the factor is EleutherAI's for activations and caches ("Transformer Math 101").
    """
    return int(as_memory("weight_bytes", weight_bytes, 1, MAX_TOTAL // 2) * 1.2) + 2 * 2**30


def _as_selection(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if not isinstance(value, (Mapping, tuple)):
        raise InvalidParameter("on", "must map nodes to indices of devices", value)
    found: dict[str, tuple[int, ...]] = {}
    for pair in value.items() if isinstance(value, Mapping) else value:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidParameter("on", "must map nodes to indices of devices", value)
        name = as_name("on", pair[0])
        indices = tuple(as_integer("on", index, 0) for index in as_items("on", pair[1]))
        if not indices or len(indices) > MAX_DEVICES:
            raise InvalidParameter("on", f"must name 1 to {MAX_DEVICES} devices of {name!r}", len(indices))
        if len(set(indices)) < len(indices) or name in found:
            raise InvalidParameter("on", f"lists a device of {name!r} twice", indices)
        found[name] = tuple(sorted(indices))
    return tuple(sorted(found.items()))
