"""Placement of models in a cluster: pure functions over plain data. No Ray, no torch, deterministic."""

from asyncengine.integrations.placement.nodes import Claim, Device, Instance, Node, Share, rule_of_thumb
from asyncengine.integrations.placement.placement import Placement, Ranked, Reason, Refusal, place, rank_for_removal
from asyncengine.integrations.placement.table import Cluster

__all__ = [
    "Claim", "Cluster", "Device", "Instance", "Node", "Placement", "Ranked", "Reason", "Refusal", "Share", "place",
    "rank_for_removal", "rule_of_thumb",
]  # fmt: skip
