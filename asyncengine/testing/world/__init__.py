"""A simulated world for the production engine: threads, loops, time and disk, all decided by one seed."""
