"""How the bundled model and its two adapters were made: the generator of conversations, the training, the measuring.

`asyncengine.demo` holds the outcome. Start in `conversations.py` (what is learned) and `train.py` (how).
"""
