"""Trainers: TRL with an engine in vLLM's place, and exact on-policy training of transformers' models.

`attach` puts an engine in the place of vLLM in a trainer of TRL, `rollout` makes a `rollout_func` of one. Nothing here
imports TRL: a trainer is whatever has the attributes of TRL's.

`make_exact` takes a causal language model of transformers and an engine. From then on the model's logits and
log-probabilities are computed by the engine's own layers, while gradients are those of transformers' layers at exactly
these hidden states. The ratio of the new policy to the one that sampled is then 1, to the bit, before the first update.
`named_weights` are a trainer's weights as checkpoints name them.
"""

from asyncengine.integrations.trl.exact_model import ExactModel, TokenScores, make_exact
from asyncengine.integrations.trl.generation import EngineGeneration, attach, rollout
from asyncengine.integrations.trl.trainer_weights import active_adapter, checkpoint_name, named_weights

__all__ = [
    "EngineGeneration", "ExactModel", "TokenScores", "active_adapter", "attach", "checkpoint_name", "make_exact",
    "named_weights", "rollout",
]  # fmt: skip
