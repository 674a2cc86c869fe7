"""Causal language models of families that are not written down, run through transformers' own modules."""
