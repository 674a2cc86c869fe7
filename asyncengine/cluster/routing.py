"""Weights by which a fleet chooses a replica: the public name of `asyncengine.integrations.placement.routing`."""

from asyncengine.integrations.placement.routing import RoutingWeights

__all__ = ["RoutingWeights"]
