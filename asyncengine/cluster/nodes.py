"""Nodes with their devices, and the instances that run on them. Plain data, checked.

Memory is in bytes, or "80GiB". Everything here is frozen and in a fixed order, so that the same cluster gives the same
placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from asyncengine.checks import as_integer, as_items, as_number
from asyncengine.config import parse_bytes
from asyncengine.errors import InvalidParameter

MAX_MEMORY = 2**50
"""Bytes of one device or node."""
MAX_TOTAL = 2**53
"""Bytes of a claim, over all its devices: as exact as float64 is, in which scores divide."""
MAX_DEVICES = 1024
"""Devices of one node."""
MAX_CPUS = 1e6

State = Literal["starting", "running", "failed"]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator of a node. Raises `InvalidParameter` naming the field."""

    index: int
    """Index by which the node numbers it."""
    memory: int
    """Bytes it has."""
    kind: str = "cuda"
    """An instance on several devices takes devices of one kind."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", as_integer("index", self.index, 0))
        object.__setattr__(self, "memory", as_memory("memory", self.memory, 1))
        object.__setattr__(self, "kind", as_name("kind", self.kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster. Raises `InvalidParameter` naming the field."""

    name: str
    host_memory: int
    devices: tuple[Device, ...] = ()
    host_reserved: int = 0
    """Bytes of host memory that are never given away."""
    device_reserved: int = 0
    """Bytes of each device that are never given away."""
    cpus: float | None = None
    """Logical CPUs to share out; None: they are not counted."""
    unified: bool = False
    """Its one device computes in host memory (Apple, GB10): both claims come out of the same bytes."""
    cluster: str = "default"
    labels: Pairs = ()
    """A mapping, or pairs of key and value; kept as sorted pairs."""
    backends: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Backends that can run a model there, with their versions: {"asyncengine": ["0.2"]}."""
    files: tuple[str, ...] = ()
    """Models whose files lie there, complete."""
    paths: tuple[str, ...] = ()
    """Local paths that exist there."""
    ready: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", as_name("name", self.name))
        object.__setattr__(self, "cluster", as_name("cluster", self.cluster))
        for field in ("host_memory", "host_reserved", "device_reserved"):
            object.__setattr__(self, field, as_memory(field, getattr(self, field)))
        if self.cpus is not None:
            object.__setattr__(self, "cpus", as_number("cpus", self.cpus, 0.0, MAX_CPUS))
        object.__setattr__(self, "devices", _as_devices(self.devices))
        object.__setattr__(self, "labels", as_pairs("labels", self.labels))
        object.__setattr__(self, "backends", _as_backends(self.backends))
        for field in ("files", "paths"):
            object.__setattr__(self, field, as_names(field, getattr(self, field)))
        for field in ("ready", "unified"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidParameter(field, "must be True or False", getattr(self, field))
        if self.unified and len(self.devices) > 1:
            raise InvalidParameter("devices", "a node of unified memory has at most one", len(self.devices))
        if self.unified and any(device.memory > self.host_memory for device in self.devices):
            raise InvalidParameter("devices", "unified memory is at most host_memory", self.devices[0].memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of one node that an instance takes."""

    node: str
    devices: tuple[tuple[int, int], ...] = ()
    """(index, bytes) of each device; none: it runs on the host's processors."""
    host_bytes: int = 0
    cpus: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "node", as_name("node", self.node))
        object.__setattr__(self, "cpus", as_number("cpus", self.cpus, 0.0, MAX_CPUS))
        object.__setattr__(self, "host_bytes", as_memory("host_bytes", self.host_bytes))
        pairs = self.devices.items() if isinstance(self.devices, Mapping) else as_items("devices", self.devices)
        taken: dict[int, int] = {}
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidParameter("devices", "must map indices of devices to bytes", self.devices)
            index = as_integer("devices", pair[0], 0)
            if index in taken:
                raise InvalidParameter("devices", f"lists device {index} twice")
            taken[index] = as_memory("devices", pair[1])
        object.__setattr__(self, "devices", tuple(taken.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A model that runs, or starts, on one or several nodes. The first share leads."""

    name: str
    model: str
    shares: tuple[Share, ...]
    state: State = "running"
    layers: tuple[int, int] | None = None
    """(layers on devices, all layers); None: not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", as_name("name", self.name))
        object.__setattr__(self, "model", as_name("model", self.model))
        shares = as_items("shares", self.shares)
        if not shares or not all(isinstance(share, Share) for share in shares):
            raise InvalidParameter("shares", "must hold at least one Share", self.shares)
        object.__setattr__(self, "shares", shares)
        if (twice := _first_twice([share.node for share in shares])) is not None:
            raise InvalidParameter("shares", f"has node {twice!r} twice")
        if self.state not in get_args(State):
            raise InvalidParameter("state", "must be one of " + ", ".join(map(repr, get_args(State))), self.state)
        if self.layers is not None:
            counts = as_items("layers", self.layers)
            if len(counts) != 2:
                raise InvalidParameter("layers", "must be (layers on devices, all layers)", self.layers)
            every = as_integer("layers", counts[1], 1)
            object.__setattr__(self, "layers", (as_integer("layers", counts[0], 0, every), every))


# ---------------------------------------------------------------- checks that several of these share


def as_memory(field: str, value: Any, low: int = 0, high: int = MAX_MEMORY) -> int:
    """Bytes from `low` to `high`, of an integer or a text like "80GiB". Raises `InvalidParameter`."""
    return as_integer(field, parse_bytes(field, value) if isinstance(value, str) else value, low, high)


def as_name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(field, "must be a str that is not empty", value)
    return value


def as_names(field: str, value: Any) -> tuple[str, ...]:
    """Names, sorted, each once."""
    if isinstance(value, str):
        raise InvalidParameter(field, "must be a sequence of str", value)
    return tuple(sorted({as_name(field, item) for item in as_items(field, value)}))


def as_pairs(field: str, value: Any) -> Pairs:
    """Labels, sorted. Raises `InvalidParameter` for a key with two values."""
    given: Iterable[Any] = value.items() if isinstance(value, Mapping) else as_items(field, value)
    found: dict[str, str] = {}
    for pair in given:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidParameter(field, "must map keys to values", value)
        key, text = as_name(field, pair[0]), pair[1]
        if not isinstance(text, str):
            raise InvalidParameter(field, f"{key!r} must have a value that is a str", text)
        if found.setdefault(key, text) != text:
            raise InvalidParameter(field, f"contradict each other: {key!r} is both {found[key]!r} and {text!r}")
    return tuple(sorted(found.items()))


def _as_devices(value: Any) -> tuple[Device, ...]:
    devices = as_items("devices", value)
    if not all(isinstance(device, Device) for device in devices):
        raise InvalidParameter("devices", "must hold Devices", value)
    if len(devices) > MAX_DEVICES:
        raise InvalidParameter("devices", f"must be at most {MAX_DEVICES}", len(devices))
    if (twice := _first_twice([device.index for device in devices])) is not None:
        raise InvalidParameter("devices", f"lists device {twice} twice")
    return devices


def _as_backends(value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, (Mapping, tuple)):
        raise InvalidParameter("backends", "must map names to versions", value)
    pairs = value.items() if isinstance(value, Mapping) else value
    found: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidParameter("backends", "must map names to versions", value)
        found[as_name("backends", pair[0])] = as_names("backends", pair[1])
    return tuple(sorted(found.items()))


def _first_twice(items: list[Any]) -> Any:
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None
