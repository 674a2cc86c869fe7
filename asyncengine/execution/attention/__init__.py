"""Attention over paged KV memory: the backend protocol and its implementations."""
