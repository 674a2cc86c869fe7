"""Running steps on a device: step buffers, the model runner and the sampler."""
