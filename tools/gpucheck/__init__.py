"""`python -m tools.gpucheck` proves the GPU path on the machine at hand, `python -m tools.gpucheck ladder` measures it.

What a check compares with is made anew in each run from a seed that is printed. A check that fails or crashes does not
stop the others.
"""
