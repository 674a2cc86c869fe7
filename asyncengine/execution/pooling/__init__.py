"""Pooling: vectors, scores and labels are made of a model's hidden states."""
