"""Replicas of an engine on many machines of a Ray cluster, behind the methods of one engine.

Needs `pip install "asyncengine[cluster]"`. Read `fleet` for its methods, `loop`, `dispatcher` and `replicas` for how
they work, `replica` for what runs on the other machines; `ray_cluster` is the only file that imports Ray.
"""

from asyncengine.cluster.fleet.fleet import Fleet
from asyncengine.cluster.fleet.settings import FleetConfig
from asyncengine.cluster.fleet.stats import FleetStats

__all__ = ["Fleet", "FleetConfig", "FleetStats"]
