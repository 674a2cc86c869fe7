"""The ladder of speed on a GPU: `python -m tests.gpu.ladder`. What must hold there is tested by `pytest tests/gpu`."""
