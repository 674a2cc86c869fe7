"""Providers of the engine for evaluation harnesses: `lm_eval` (lm-evaluation-harness) and `inspect_ai` (Inspect)."""
