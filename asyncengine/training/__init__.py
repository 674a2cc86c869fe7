"""Exact on-policy training: a transformers model whose forward has the bits of the engine that samples from it.

`make_exact` takes a causal language model of transformers and an engine. From then on the model's logits and
log-probabilities are computed by the engine's own layers, while gradients are those of transformers' layers at exactly
these hidden states. The ratio of the new policy to the one that sampled is then 1, to the bit, before the first update.
`named_weights` are a trainer's weights as checkpoints name them.
"""

from asyncengine.training.exact_model import ExactModel, TokenScores, make_exact
from asyncengine.training.trainer_weights import active_adapter, checkpoint_name, named_weights

__all__ = ["ExactModel", "TokenScores", "active_adapter", "checkpoint_name", "make_exact", "named_weights"]
