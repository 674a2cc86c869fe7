"""Replicas of an engine, on this machine or on many of a Ray cluster, behind the methods of one engine.

Read `fleet` for its methods, `frontend`, `dispatcher` and `replicas` for how they work, `replica` for what runs in the
other processes. Those are this machine's (`frontend`) or a cluster's: `ray_cluster` is the only file that imports Ray,
and needs `pip install "asyncengine[cluster]"`.
"""

from asyncengine.integrations.fleet.fleet import Fleet
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.fleet.stats import FleetStats

__all__ = ["Fleet", "FleetConfig", "FleetStats"]
