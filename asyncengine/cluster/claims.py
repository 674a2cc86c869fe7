"""The claim of a model: what it needs of a cluster, and where it may go. Plain data, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

from asyncengine.checks import Positive, Settings, as_integer, as_items, number_in
from asyncengine.cluster.nodes import (
    MAX_DEVICES,
    MAX_TOTAL,
    Cpus,
    Labels,
    Memory,
    Name,
    as_labels,
    as_mapping,
    as_memory,
    as_name,
)
from asyncengine.errors import InvalidParameter


def _as_split(field: str, value: Any) -> tuple[int, ...]:
    return tuple(as_integer(field, number, 1) for number in as_items(field, value))


def _as_selection(field: str, value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, tuple[int, ...]] = {}
    for node, wanted in as_mapping(field, value, "must map nodes to indices of devices"):
        name = as_name(field, node)
        indices = tuple(as_integer(field, index, 0) for index in as_items(field, wanted))
        if not indices or len(indices) > MAX_DEVICES:
            raise InvalidParameter(field, f"must name 1 to {MAX_DEVICES} devices of {name!r}", len(indices))
        if len(set(indices)) < len(indices) or name in found:
            raise InvalidParameter(field, f"lists a device of {name!r} twice", indices)
        found[name] = tuple(sorted(indices))
    return tuple(sorted(found.items()))


Total = Annotated[int, functools.partial(as_memory, low=1, high=MAX_TOTAL)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Settings):
    """The needs of one instance of a model. At least one of `device_bytes` and `cpu_bytes` is given.

    Raises `InvalidParameter` naming the field.
    """

    model: Name
    """Its name: instances of the same are spread, and nodes with its files preferred."""
    device_bytes: Total | None = None
    """Memory over all its devices: weights, KV cache and what a step takes. None: it runs on no device."""
    cpu_bytes: Total | None = None
    """Host memory of an instance that runs on the host's processors. None: it cannot."""
    copied_bytes: Annotated[int, functools.partial(as_memory, high=MAX_TOTAL)] = 0
    """The part of `device_bytes` of which each of several devices has a copy, as of what a step takes; the rest is
    divided evenly."""
    host_bytes: Memory = 0
    """Host memory beside devices, on each of its nodes."""
    cpus: Cpus = 0.0
    """Logical CPUs, on each of its nodes."""
    utilization: Annotated[float, number_in(0.0, 1.0)] = 0.0
    """0: it takes its share of `device_bytes` of each device. Above 0, the share of each device that it takes whatever
    it needs, as vLLM does (gpu_memory_utilization): only devices of which so much is free are considered."""
    devices: Positive | None = None
    """Number of devices; None: as few as suffice."""
    split: Annotated[tuple[int, ...], _as_split] = ()
    """Numbers that its devices on one node must divide: attention heads, vocabulary."""
    several_nodes: bool = False
    """True: it may span nodes."""
    cluster: Name | None = None
    labels: Annotated[Labels, as_labels] = ()
    """Labels that a node must have."""
    on: Annotated[tuple[tuple[str, tuple[int, ...]], ...], _as_selection] = ()
    """Only these devices: {node: [indices]}. Empty: any."""
    backend: Name | None = None
    version: Name | None = None
    """Version of the backend; None: any."""
    path: Name | None = None
    """A local path that must exist on its nodes."""
    draft: Name | None = None
    """Draft model of speculation, whose files a node should have, too."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)  # `super()` does not find its class in a dataclass with slots
        if self.device_bytes is None and self.cpu_bytes is None:
            raise InvalidParameter("device_bytes", "must be given where cpu_bytes is not")
        as_integer("copied_bytes", self.copied_bytes, 0, self.device_bytes or 0)
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


def claim_of(model: str, memory: int, ranks: int, copied: int, device: str) -> Claim:
    """The claim of an engine whose ranks take `memory` bytes together: on a `device` each ("cuda"), on one host's
    processors ("cpu"), or on either ("auto"). `copied`: bytes of `memory` that each rank has of its own."""
    if device == "cpu":
        return Claim(model=model, cpu_bytes=memory)
    divided = memory - (ranks - 1) * copied
    host = memory if device == "auto" else None
    return Claim(model=model, device_bytes=divided, cpu_bytes=host, copied_bytes=copied, devices=ranks)
