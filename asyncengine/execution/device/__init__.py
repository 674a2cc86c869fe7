"""The machine an engine runs on: memory, copies between host and device, cores, threads, and this process."""
