"""The making of the bundled model that reads pictures: drawn shapes, questions about them, the training, the measuring.

`asyncengine.demo` holds the outcome. Start in `scenes.py` and `questions.py` (what is learned) and `train.py` (how).
"""
