"""Settings of a fleet, beside those of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from asyncengine.checks import as_integer, as_number, as_seconds, knows_its_fields
from asyncengine.cluster.nodes import MAX_CPUS
from asyncengine.cluster.routing import RoutingWeights
from asyncengine.cluster.scores import check_strategy
from asyncengine.config import parse_bytes
from asyncengine.errors import InvalidParameter

MAX_REPLICAS = 4096


@knows_its_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of a fleet. Raises `InvalidParameter` naming the field for a value outside its range."""

    replicas: int = 1
    """Number of engines, each in a process of its own."""
    name: str | None = None
    """Unique among the fleets of a Ray cluster, and what its processes are called there. None: a fresh one."""
    address: str | None = None
    """"HOST:PORT" of a Ray head, or "auto" for the one this machine belongs to. None: the Ray this program is connected
    to, else one that is started here and ends with the fleet."""
    num_cpus: float = 1.0
    """CPUs that a replica takes on its node."""
    num_gpus: float = 0.0
    """GPUs that a replica takes, up to 1: an engine computes on one. A part of one is that part of its memory, too."""
    replica_memory: int | str | None = None
    """Bytes that a replica takes of its node (or "20GiB"): of the GPU, or without one of the host. None: read from the
    model's files (weights, a KV cache of `kv_cache_memory` or of one long request, recurrent states, a step)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray labels that a node must have to get a replica."""
    placement: Literal["spread", "binpack"] = "spread"
    """Node with room that gets a replica: one with few of them ("spread"), or that which it fills most ("binpack")."""
    on_loss: Literal["error", "resume"] = "error"
    """Fate of a lost replica's requests: they end with `EngineDead`, or go on elsewhere where they were."""
    start_timeout: float = 300.0
    """Seconds until a replica must have loaded its model."""
    silence_limit: float = 10.0
    """Seconds of silence after which a replica is lost. (One whose process or node ends is lost at once.)"""
    weights: RoutingWeights = field(default_factory=RoutingWeights)
    """Weights by which the router chooses a replica for a request."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "replicas", as_integer("replicas", self.replicas, 1, MAX_REPLICAS))
        set_(self, "num_cpus", as_number("num_cpus", self.num_cpus, 0.0, MAX_CPUS))
        set_(self, "num_gpus", as_number("num_gpus", self.num_gpus, 0.0, 1.0))
        set_(self, "replica_memory", parse_bytes("replica_memory", self.replica_memory))
        check_strategy(self.placement, "placement")
        for name in ("start_timeout", "silence_limit"):
            set_(self, name, as_seconds(name, getattr(self, name)))
        for name in ("name", "address"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
                raise InvalidParameter(name, "must be a printable str or None", value)
        if self.on_loss not in ("error", "resume"):
            raise InvalidParameter("on_loss", "must be 'error' or 'resume'", self.on_loss)
        if not isinstance(self.weights, RoutingWeights):
            raise InvalidParameter("weights", "must be RoutingWeights", self.weights)
        labels = self.labels.items() if isinstance(self.labels, Mapping) else [(None, None)]
        if not all(isinstance(name, str) and isinstance(value, str) for name, value in labels):
            raise InvalidParameter("labels", "must map names of labels to values", self.labels)
        set_(self, "labels", dict(self.labels))

    @classmethod
    def names(cls) -> list[str]:
        return [item.name for item in fields(cls)]
