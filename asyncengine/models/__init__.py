"""Loading models and preparing them for execution: attention hook, fusions, weight layouts."""
