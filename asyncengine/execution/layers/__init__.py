"""Building blocks of a forward: linear layers, norms, rotary embedding, attention, feed-forward, embedding, head."""
