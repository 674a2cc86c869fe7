"""Language models: the decoder and its families, checkpoints and their weights, and the fallback to transformers."""
