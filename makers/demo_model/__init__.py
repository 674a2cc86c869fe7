"""The making of the bundled model and its two adapters: the generator of conversations, the training, the measuring.

`asyncengine.demo` holds the outcome. Start in `conversations.py` (what is learned) and `train.py` (how).
"""
