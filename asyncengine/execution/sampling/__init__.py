"""From logits to tokens: logit processors, masks of grammars, penalties, and the draw."""
