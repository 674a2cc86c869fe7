"""Exact on-policy training: a transformers model whose forward has the bits of the engine that samples from it.

`make_exact` takes a causal language model of transformers and an engine. From then on the model's logits and
log-probabilities are computed by the engine's own layers, while gradients are those of transformers' layers at exactly
these hidden states. The ratio of the new policy to the one that sampled is then 1, to the bit, before the first update.
"""

from asyncengine.training.exact_model import ExactModel, TokenScores, make_exact

__all__ = ["ExactModel", "TokenScores", "make_exact"]
