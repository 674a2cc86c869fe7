"""Providers of the engine for evaluation harnesses: `inspect_ai` (Inspect)."""
