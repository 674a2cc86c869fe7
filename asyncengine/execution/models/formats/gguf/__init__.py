"""GGUF, llama.cpp's format: one file (or a few) that is a whole model, its weights quantized in blocks.

`model.GgufModel` reads a `container`, whose tensors are `blocks`; finds the row of its architecture (`architectures`);
makes the content of config.json (`config`, of the typed `header`) and transformers' tensors (`tensors`, by `names`).

Source: the format's specification (ggml, docs/gguf.md) and llama.cpp's converter, whose work is undone here.
"""
