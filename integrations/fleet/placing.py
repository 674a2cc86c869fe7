"""Placement of a fleet's replicas: Ray's nodes as `place` describes them, and the claim of a replica. No Ray here.

Ray describes each node's resources, those that are not reserved, and its labels, but not the memory of a GPU: a label
gives it, or the node is asked. What a replica needs is read from its checkpoint (`models.memory`).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncengine.assembly.wiring import needed_memory
from asyncengine.checks import parse_bytes
from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, FleetError, InvalidParameter
from asyncengine.integrations.fleet.processes import packed
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.placement import (
    Claim,
    Cluster,
    Device,
    Instance,
    Node,
    Placement,
    Refusal,
    Share,
    place,
    rank_for_removal,
)
from asyncengine.integrations.placement.nodes import MAX_MEMORY, claim_of, on_each

DEVICE_MEMORY = "asyncengine/device-memory"
"""Label of a Ray node: the memory of each of its GPUs, "80GiB"."""
_DEVICE_TYPE = "ray.io/accelerator-type"


def read_claim(model: str, config: EngineConfig, settings: FleetConfig, stages: int = 1) -> Claim:
    """The claim of one replica, or with several `stages` that of one stage, read from the headers of the model's files,
    which must be on this machine.

    Raises what loading would raise for the files: `ModelNotFound`, `UnsupportedModel`, `InvalidParameter`; the last
    also where ranks would share a GPU.
    """
    ranks = config.processes // stages
    if config.pipeline_parallel > 1 and settings.num_gpus:
        raise InvalidParameter("num_gpus", "must be 0 with pipeline_parallel, which is for CPUs", settings.num_gpus)
    if ranks > 1 and settings.num_gpus not in (0.0, 1.0):
        raise InvalidParameter("num_gpus", "must be 0 or 1 for replicas of several ranks", settings.num_gpus)
    device = "cuda" if settings.num_gpus else "cpu"
    if isinstance(settings.replica_memory, int):
        memory, copied = settings.replica_memory, 0
    else:
        memory, copied = needed_memory(model, config, device)
    if stages > 1:
        memory = on_each(stages, memory, copied * config.tensor_parallel)
    claim = claim_of(model.rstrip("/").rsplit("/", 1)[-1], memory, ranks, copied, device)
    # Ray counts a part of a GPU as that number; the replica takes the same part of its memory
    return claim.replace(cpus=settings.num_cpus * ranks, labels=settings.labels, utilization=settings.num_gpus)


def read_claims(model: str, config: EngineConfig, settings: FleetConfig) -> list[Claim]:
    """The claim of one replica and, if it is a pipeline of stages, that of one stage. Raises as `read_claim` does."""
    counts = sorted({1, config.pipeline_parallel})
    return [read_claim(model, config, settings, stages) for stages in counts]


def try_read_claims(model: str, config: EngineConfig, settings: FleetConfig) -> bytes:
    """`read_claims` on a node, packed, so that errors keep their types."""
    try:
        return packed(read_claims(model, config, settings))
    except EngineError as error:
        return packed(None, error)


def read_devices() -> tuple[int, ...]:
    """Memory in bytes of each GPU of this node, read in a process of its own: Ray hides the GPUs from this one, which
    may become a replica's and must not have touched CUDA before."""
    visible = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    probe = "import torch; print(*(torch.cuda.mem_get_info(i)[1] for i in range(torch.cuda.device_count())))"
    printed = subprocess.run([sys.executable, "-c", probe], env=visible, capture_output=True, text=True, check=True)
    return tuple(int(count) for count in printed.stdout.split())


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive, as Ray describes it."""

    id: str
    address: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    """Resources by name: CPU, GPU, memory in bytes."""
    free: Mapping[str, float]
    """Amounts of these that are not reserved."""
    devices: tuple[int, ...] = ()
    """Memory in bytes of each GPU; empty where it is unknown."""

    def device_memory(self) -> tuple[int, ...] | None:
        """Memory in bytes of each GPU, from the node's label; None without one. Raises `FleetError` for a bad label."""
        label, count = self.labels.get(DEVICE_MEMORY), int(self.total.get("GPU", 0))
        if not count:
            return ()
        if label is None:
            return None
        try:
            memory = parse_bytes(DEVICE_MEMORY, label)
        except InvalidParameter as error:
            raise FleetError(f"node {self.id[:8]} has a label that is not understood: {error}") from None
        assert isinstance(memory, int)
        return (memory,) * count


def place_replica(
    claim: Claim, nodes: Sequence[RayNode], ours: Sequence[Instance], lost_on: Mapping[str, int], settings: FleetConfig
) -> Placement | Refusal:
    """Place one more replica, or stage, beside `ours`. Nodes that have lost fewer replicas (`lost_on`, by id) come
    first, whatever runs on them. Raises `InvalidParameter` for a node whose values are out of range."""
    for most in sorted({lost_on.get(node.id, 0) for node in nodes}) or [0]:
        allowed = [node for node in nodes if lost_on.get(node.id, 0) <= most]
        placement = place(claim, _as_cluster(allowed, ours, settings), strategy=settings.placement)
        if isinstance(placement, Placement):
            break
    return placement


def place_stages(
    claim: Claim, stages: int, nodes: Sequence[RayNode], ours: Sequence[Instance], lost_on: Mapping[str, int],
    settings: FleetConfig,
) -> Placement | Refusal:  # fmt: skip
    """Place a replica of several stages, each with this claim, on as many nodes; the first leads. Otherwise as
    `place_replica`."""
    left, placed = list(nodes), list[Placement]()
    while len(placed) < stages:
        outcome = place_replica(claim, left, ours, lost_on, settings)
        if isinstance(outcome, Refusal):
            return outcome
        placed.append(outcome)
        left = [node for node in left if node.id != outcome.shares[0].node]
    shares = tuple(share for placement in placed for share in placement.shares)
    return Placement(claim.model, "nodes", shares, min(placement.score for placement in placed), placed[0].candidates)


def removal_scores(nodes: Sequence[RayNode], ours: Sequence[Instance], settings: FleetConfig) -> dict[str, float]:
    """Score of keeping each of `ours`, by name, without those on nodes that are gone."""
    if not ours:
        return {}
    table = _as_cluster(nodes, ours, settings)
    ranked = rank_for_removal(table, ours[0].model, strategy=settings.placement)  # all are of one model
    return {item.instance.name: item.score for item in ranked}


def _as_cluster(ray_nodes: Sequence[RayNode], ours: Sequence[Instance], settings: FleetConfig) -> Cluster:
    """The nodes in `ray_nodes`, and those of `ours` that are there."""
    ids = {node.id for node in ray_nodes}
    alive = [instance for instance in ours if ids.issuperset(share.node for share in instance.shares)]
    shares = [share for instance in alive for share in instance.shares]
    nodes = [_as_node(node, [share for share in shares if share.node == node.id], settings) for node in ray_nodes]
    return Cluster(nodes, alive)


def _as_node(node: RayNode, shares: Sequence[Share], settings: FleetConfig) -> Node:
    """The node for `place`. Its memory and CPUs are the free ones and those that replicas have reserved by `shares`,
    since `place` subtracts the replicas' again."""
    memory = node.free.get("memory", 0) + sum(share.host_bytes for share in shares)
    cpus = node.free.get("CPU", 0) + sum(share.cpus for share in shares)
    device_type = node.labels.get(_DEVICE_TYPE, "cuda")
    in_use = {index for share in shares for index, _ in share.devices}
    ranks = sum(len(share.devices) for share in shares)
    foreign = math.ceil(node.total.get("GPU", 0) - node.free.get("GPU", 0) - settings.num_gpus * ranks - 1e-4)
    # Ray does not say which GPUs other programs have: assume the last of those that none of ours is on
    untaken = [index for index in range(len(node.devices)) if index not in in_use]
    hidden = untaken[max(0, len(untaken) - foreign) :] if foreign > 0 else []
    return Node(
        name=node.id,
        # Ray reports a reservation with delay, so free and reserved may add up to more than the node has
        host_memory=min(int(memory), int(node.total.get("memory", 0)), MAX_MEMORY),
        cpus=min(cpus, node.total.get("CPU", 0)),
        devices=tuple(
            Device(index=index, memory=min(count, MAX_MEMORY), kind=device_type)
            for index, count in enumerate(node.devices)
            if index not in hidden
        ),
        labels=tuple(node.labels.items()),
    )
