"""Settings of a fleet, beside those of its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from asyncengine.checks import Memory, Positive, Seconds, Settings, as_choice, as_integer, as_items, number_in
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.placement.nodes import MAX_CPUS, as_labels
from asyncengine.integrations.placement.routing import ROLES, Role, RoutingWeights

MAX_REPLICAS = 4096


def _replicas(name: str, value: Any) -> int | str:
    if isinstance(value, str) and value != "numa":
        raise InvalidParameter(name, 'must be an integer or "numa"', value)
    return value if isinstance(value, str) else as_integer(name, value, 1, MAX_REPLICAS)


def _printable(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise InvalidParameter(name, "must be a printable str or None", value)
    return value


def _labels(name: str, value: Any) -> dict[str, str]:
    return dict(as_labels(name, value))


def _roles(name: str, value: Any) -> tuple[str, ...]:
    return tuple(as_choice(name, role, ROLES) for role in as_items(name, value))


def _weights(name: str, value: Any) -> RoutingWeights:
    if not isinstance(value, RoutingWeights):
        raise InvalidParameter(name, "must be RoutingWeights", value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(Settings):
    """Settings of a fleet. Raises `InvalidParameter` naming the field for a value outside its range."""

    replicas: Annotated[int | Literal["numa"], _replicas] = 1
    """Number of engines, each in a process of its own. "numa": one for each memory node of this machine."""
    name: Annotated[str, _printable] | None = None
    """Unique among the fleets of a Ray cluster, and what its processes are called there. None: a fresh one."""
    address: Annotated[str, _printable] | None = None
    """"HOST:PORT" of a Ray head, or "auto" for the one this machine belongs to; "local": this machine alone, whose
    cores the replicas divide, without Ray. None: the Ray this program is connected to, else "local"."""
    num_cpus: Annotated[float, number_in(0.0, MAX_CPUS)] = 1.0
    """CPUs that each process of a replica (`tensor_parallel`, `pipeline_parallel`) takes on its node of Ray's."""
    num_gpus: Annotated[float, number_in(0.0, 1.0)] = 0.0
    """GPUs that each rank of a replica takes, up to 1. A part of one is that part of its memory, too; where a replica
    has several ranks, all on one node, each takes a whole one or none."""
    replica_memory: Memory | None = None
    """Bytes that a replica takes of its node (or "20GiB"): of its GPUs, or without one of the host. None: read from the
    model's files (weights, a KV cache of `kv_cache_memory` or of one long request, recurrent states, a step)."""
    labels: Annotated[Mapping[str, str], _labels] = field(default_factory=dict)
    """Ray labels that a node must have to get a replica."""
    placement: Literal["spread", "binpack"] = "spread"
    """Node with room that gets a replica: one with few of them ("spread"), or that which it fills most ("binpack")."""
    on_loss: Literal["error", "resume"] = "error"
    """Fate of a lost replica's requests: they end with `EngineDead`, or go on elsewhere where they were."""
    start_timeout: Seconds = 300.0
    """Seconds until a replica must have loaded its model."""
    silence_limit: Seconds = 10.0
    """Seconds of silence after which a replica is lost. (One whose process or node ends is lost at once.)"""
    share_prefixes: bool = True
    """Whether a replica asks another one for a prefix which that has, before it computes it. On a CPU."""
    roles: Annotated[Sequence[Role], _roles] = ()
    """Roles of the first replicas, in order; others have "both". A long prompt of a request to a "decode" replica is
    computed by a "prefill" or "both" one, and pulled from there."""
    min_prefill_tokens: Positive = 256
    """Tokens that a prompt must have beyond what is cached at its "decode" replica to be computed by another one."""
    weights: Annotated[RoutingWeights, _weights] = field(default_factory=RoutingWeights)
    """Weights by which the router chooses a replica for a request."""

    def roles_of(self, replicas: int) -> list[Role]:
        """Role of each of the first `replicas`. Raises `InvalidParameter` where they cannot serve with these."""
        if len(self.roles) > replicas:
            raise InvalidParameter("roles", f"must be at most {replicas}, one for each replica", self.roles)
        if self.roles.count("prefill") == replicas:
            raise InvalidParameter("roles", 'must leave one "decode" or "both": it takes the requests', self.roles)
        if set(self.roles) - {"both"} and not self.share_prefixes:
            raise InvalidParameter("share_prefixes", "must be True where replicas have roles", self.share_prefixes)
        defaults: list[Role] = ["both"] * (replicas - len(self.roles))
        return [*self.roles, *defaults]
