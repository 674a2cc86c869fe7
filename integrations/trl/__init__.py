"""TRL: `attach` puts an engine in the place of vLLM in a trainer, `rollout` makes a `rollout_func` of one.

Nothing here imports TRL: a trainer is whatever has the attributes of TRL's.
"""

from asyncengine.integrations.trl.generation import EngineGeneration, attach
from asyncengine.integrations.trl.rollouts import rollout
from asyncengine.training import checkpoint_name, named_weights

__all__ = ["EngineGeneration", "attach", "checkpoint_name", "named_weights", "rollout"]
