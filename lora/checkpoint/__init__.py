"""Reading adapters as PEFT stores them: configuration, patterns of module names, tensors."""
