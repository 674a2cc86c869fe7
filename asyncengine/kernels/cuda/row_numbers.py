"""Numbers of rows whose logits are processed, as kernels read them: int64 [NUMBERS, rows]. This needs no triton."""

SLOT, POSITION, ROW, PROMPT, COUNTS, REPETITION, FREQUENCY, PRESENCE, COUNT, MASK = range(10)
"""The row's slot and the position of the token to be sampled, which the sampler reads; its index among the step's rows;
the addresses of what the prompt has, bool [vocab], and of how often the output has it, int32 [vocab], both 0 without
penalties; float64 bits of its penalties; 1 if the row's input is to be counted first; its mask's number, or -1."""
BIASED, BIASES, NUM_BIASES, STOPS, NUM_STOPS = range(10, 15)
"""Addresses and count of biased ids, int64, and their biases, float32; address and count of ids, int64, that are masked
unless nothing else is left."""
NUMBERS = 16
"""Count of these, with one to spare."""
