"""The making of the bundled reranker: from the embedder's weights, and the same generator's pairs.

`asyncengine.demo` holds the outcome. Start in `train.py` (how it learns) and `candidates.py` (from what).
"""
