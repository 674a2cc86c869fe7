"""Replicas of an engine behind the methods of one: the public names of `asyncengine.integrations.fleet`."""

from asyncengine.integrations.fleet import Fleet, FleetConfig, FleetStats

__all__ = ["Fleet", "FleetConfig", "FleetStats"]
