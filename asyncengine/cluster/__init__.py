"""Placement of models in a cluster, and fleets of engines: the public names of `asyncengine.integrations.placement`."""

from asyncengine.integrations.placement import *  # noqa: F403
from asyncengine.integrations.placement import __all__ as __all__
