"""Calls for vectors, scores and labels: their checks, their tokens, their batches in the engine, and their answers."""
