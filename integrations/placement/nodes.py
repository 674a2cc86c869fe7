"""Nodes with their devices, the instances that run on them, and what a model claims. Plain data, checked.

Memory is in bytes, or "80GiB". Everything here is frozen and in a fixed order, so that the same cluster gives the same
placement.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from asyncengine.checks import Count, Positive, Settings, as_integer, as_items, number_in, parse_bytes
from asyncengine.errors import InvalidParameter

MAX_MEMORY = 2**50
"""Bytes of one device or node."""
MAX_TOTAL = 2**53
"""Bytes of a claim, over all its devices: as exact as float64 is, in which scores divide."""
MAX_DEVICES = 1024
"""Devices of one node."""
MAX_CPUS = 1e6


def as_memory(field: str, value: Any, low: int = 0, high: int = MAX_MEMORY) -> int:
    """Bytes from `low` to `high`, of an integer or a text like "80GiB". Raises `InvalidParameter`."""
    return as_integer(field, parse_bytes(field, value) if isinstance(value, str) else value, low, high)


def size(count: int) -> str:
    """Bytes in words: "1.50 GiB"."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"


def as_name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(field, "must be a str that is not empty", value)
    return value


def as_names(field: str, value: Any) -> tuple[str, ...]:
    """Names, sorted, each once."""
    if isinstance(value, str):
        raise InvalidParameter(field, "must be a sequence of str", value)
    return tuple(sorted({as_name(field, item) for item in as_items(field, value)}))


def as_mapping(field: str, value: Any, limit: str) -> list[tuple[Any, Any]]:
    """The items of a mapping, or of a sequence of pairs. Raises `InvalidParameter`, which says `limit`."""
    pairs = list(value.items()) if isinstance(value, Mapping) else list(as_items(field, value))
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise InvalidParameter(field, limit, value)
    return pairs


def as_labels(field: str, value: Any) -> Labels:
    """Labels, sorted. Raises `InvalidParameter` for a key with two values."""
    labels: dict[str, str] = {}
    for name, text in as_mapping(field, value, "must map keys to values"):
        key = as_name(field, name)
        if not isinstance(text, str):
            raise InvalidParameter(field, f"{key!r} must have a value that is a str", text)
        if labels.setdefault(key, text) != text:
            raise InvalidParameter(field, f"contradict each other: {key!r} is both {labels[key]!r} and {text!r}")
    return tuple(sorted(labels.items()))


def _check_once(field: str, items: list[Any], noun: str) -> None:
    """Raise `InvalidParameter` for an item that is there twice."""
    if len(set(items)) < len(items):
        twice = next(item for number, item in enumerate(items) if item in items[:number])
        raise InvalidParameter(field, f"lists {noun} {twice!r} twice")


def _as_devices(field: str, value: Any) -> tuple[Device, ...]:
    devices = as_items(field, value)
    if not all(isinstance(device, Device) for device in devices):
        raise InvalidParameter(field, "must hold Devices", value)
    if len(devices) > MAX_DEVICES:
        raise InvalidParameter(field, f"must be at most {MAX_DEVICES}", len(devices))
    _check_once(field, [device.index for device in devices], "device")
    return devices


def _as_backends(field: str, value: Any) -> Backends:
    pairs = as_mapping(field, value, "must map names to versions")
    return tuple(sorted({as_name(field, name): as_names(field, versions) for name, versions in pairs}.items()))


def _as_claims(field: str, value: Any) -> tuple[tuple[int, int], ...]:
    pairs = as_mapping(field, value, "must map indices of devices to bytes")
    claims = tuple((as_integer(field, index, 0), as_memory(field, count)) for index, count in pairs)
    _check_once(field, [index for index, _ in claims], "device")
    return claims


def _as_shares(field: str, value: Any) -> tuple[Share, ...]:
    shares = as_items(field, value)
    if not shares or not all(isinstance(share, Share) for share in shares):
        raise InvalidParameter(field, "must hold at least one Share", value)
    _check_once(field, [share.node for share in shares], "node")
    return shares


def _as_layers(field: str, value: Any) -> tuple[int, int]:
    counts = as_items(field, value)
    if len(counts) != 2:
        raise InvalidParameter(field, "must be (layers on devices, all layers)", value)
    every = as_integer(field, counts[1], 1)
    return as_integer(field, counts[0], 0, every), every


State = Literal["starting", "running", "failed"]
Labels = tuple[tuple[str, str], ...]
Backends = tuple[tuple[str, tuple[str, ...]], ...]
Name = Annotated[str, as_name]
Names = Annotated[tuple[str, ...], as_names]
Memory = Annotated[int, as_memory]
Cpus = Annotated[float, number_in(0.0, MAX_CPUS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Settings):
    """An accelerator of a node. Raises `InvalidParameter` naming the field."""

    index: Count
    """Index by which the node numbers it."""
    memory: Annotated[int, functools.partial(as_memory, low=1)]
    """Bytes it has."""
    kind: Name = "cuda"
    """An instance on several devices takes devices of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Settings):
    """A machine of the cluster. Raises `InvalidParameter` naming the field."""

    name: Name
    host_memory: Memory
    devices: Annotated[tuple[Device, ...], _as_devices] = ()
    host_reserved: Memory = 0
    """Bytes of host memory that are never given away."""
    device_reserved: Memory = 0
    """Bytes of each device that are never given away."""
    cpus: Cpus | None = None
    """Logical CPUs to share out; None: they are not counted."""
    unified: bool = False
    """Its one device computes in host memory (Apple, GB10): both claims come out of the same bytes."""
    cluster: Name = "default"
    labels: Annotated[Labels, as_labels] = ()
    """A mapping, or pairs of key and value; kept as sorted pairs."""
    backends: Annotated[Backends, _as_backends] = ()
    """Backends that can run a model there, with their versions: {"asyncengine": ["0.2"]}."""
    files: Names = ()
    """Models whose files lie there, complete."""
    paths: Names = ()
    """Local paths that exist there."""
    ready: bool = True

    def __post_init__(self) -> None:
        Settings.__post_init__(self)  # `super()` does not find its class in a dataclass with slots
        if self.unified and len(self.devices) > 1:
            raise InvalidParameter("devices", "a node of unified memory has at most one", len(self.devices))
        if self.unified and any(device.memory > self.host_memory for device in self.devices):
            raise InvalidParameter("devices", "unified memory is at most host_memory", self.devices[0].memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Settings):
    """The part of one node that an instance takes."""

    node: Name
    devices: Annotated[tuple[tuple[int, int], ...], _as_claims] = ()
    """(index, bytes) of each device; none: it runs on the host's processors."""
    host_bytes: Memory = 0
    cpus: Cpus = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance(Settings):
    """A model that runs, or starts, on one or several nodes. The first share leads."""

    name: Name
    model: Name
    shares: Annotated[tuple[Share, ...], _as_shares]
    state: State = "running"
    layers: Annotated[tuple[int, int], _as_layers] | None = None
    """(layers on devices, all layers); None: not known."""


def _as_split(field: str, value: Any) -> tuple[int, ...]:
    return tuple(as_integer(field, number, 1) for number in as_items(field, value))


def _as_selection(field: str, value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    selection: dict[str, tuple[int, ...]] = {}
    for node, wanted in as_mapping(field, value, "must map nodes to indices of devices"):
        name = as_name(field, node)
        indices = tuple(as_integer(field, index, 0) for index in as_items(field, wanted))
        if not indices or len(indices) > MAX_DEVICES:
            raise InvalidParameter(field, f"must name 1 to {MAX_DEVICES} devices of {name!r}", len(indices))
        if len(set(indices)) < len(indices) or name in selection:
            raise InvalidParameter(field, f"lists a device of {name!r} twice", indices)
        selection[name] = tuple(sorted(indices))
    return tuple(sorted(selection.items()))


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
    """The part of `device_bytes` that each of several devices holds whole, such as a step's buffers; the rest is
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
        """Tell whether the model can be split over a number of devices of a node."""
        return all(number % devices == 0 for number in self.split)

    def per_device(self, devices: Any) -> Any:
        """Bytes that each of `devices` devices takes: an integer, or an array for an array of counts."""
        assert self.device_bytes is not None
        # copied + (device - copied) / devices, rounded up: the negated floor division does that for arrays, too
        return self.copied_bytes - (self.copied_bytes - self.device_bytes) // devices

    def largest(self, most: Any, devices: Any) -> Any:
        """The inverse of `per_device`: the largest `device_bytes` of which each of `devices` devices takes at most
        `most`. A result below `copied_bytes` means that none fits."""
        return self.copied_bytes + (most - self.copied_bytes) * devices


def rule_of_thumb(weight_bytes: int) -> int:
    """`device_bytes` of a language model, from the size of its weights alone: 1.2 times these and 2 GiB.

    GPUStack's rule; the factor is EleutherAI's for activations and caches ("Transformer Math 101").
    """
    return int(as_memory("weight_bytes", weight_bytes, 1, MAX_TOTAL // 2) * 1.2) + 2 * 2**30


def on_each(machines: int, memory: int, step: int) -> int:
    """Bytes on each of several machines that divide `memory` evenly, but for `step` bytes, which each needs whole."""
    return -((step - memory) // machines) + step


def claim_of(model: str, memory: int, ranks: int, copied: int, device: str) -> Claim:
    """The claim of an engine whose ranks take `memory` bytes together: on a `device` each ("cuda"), on one host's
    processors ("cpu"), or on either ("auto"). `copied`: bytes of `memory` that each rank has of its own."""
    if device == "cpu":
        return Claim(model=model, cpu_bytes=memory)
    divided = memory - (ranks - 1) * copied
    host = memory if device == "auto" else None
    return Claim(model=model, device_bytes=divided, cpu_bytes=host, copied_bytes=copied, devices=ranks)
