"""Estimates of the memory that a model needs, and how much of it its caches get."""
