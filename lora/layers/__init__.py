"""Adapters on the device: the products they change, their factors in slots, what they add to the rows of a step."""
