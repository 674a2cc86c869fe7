"""From hidden states to what is asked for in place of text: vectors, scores, labels."""
