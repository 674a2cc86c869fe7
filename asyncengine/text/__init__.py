"""Text around the engine: tokenizers, incremental detokenization, stop strings and chat templates."""
