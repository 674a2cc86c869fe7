"""Placement of models in a cluster, and fleets of engines: the public names of `asyncengine.integrations.placement`."""

from asyncengine.integrations.placement import (
    Claim,
    Cluster,
    Device,
    Instance,
    Node,
    Placement,
    Ranked,
    Reason,
    Refusal,
    Share,
    place,
    rank_for_removal,
    rule_of_thumb,
)  # fmt: skip

__all__ = [
    "Claim", "Cluster", "Device", "Instance", "Node", "Placement", "Ranked", "Reason", "Refusal", "Share", "place",
    "rank_for_removal", "rule_of_thumb",
]  # fmt: skip
