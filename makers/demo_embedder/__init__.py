"""The making of the bundled embedder: texts that say the same in other words, the training, the measuring.

`asyncengine.demo` holds the outcome. Start in `pairs.py` (what is learned) and `train.py` (how).
"""
