"""Execution of steps: the forward of models, their layers, attention, sampling and the memory of devices."""
