"""GGUF, llama.cpp's format: one file (or a few) that is a whole model, its weights quantized in blocks.

`container` reads a file's header, `types` and `unpack` know the blocks, `matrix` is one quantized tensor,
`architectures` and `config` turn the header into a Hugging Face configuration, `names` says what its tensors are called
there, and `model.open_gguf` puts it together.

Source: the format's specification (ggml, docs/gguf.md) and llama.cpp's converter, whose work is undone here.
"""
