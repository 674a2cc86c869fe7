"""One file for each system: loads it and runs requests. Nothing is imported before a worker asks for it by name."""
