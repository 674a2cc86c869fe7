"""What a forward is written with: linear layers, norms, rotary embedding, attention, feed-forward, embedding, head."""
