"""Guessing ahead: which tokens may come next, and how many guesses a step is worth. Pure: no await, no torch.

One stream is bound by memory: a step that computes eight positions of a request costs little more than one. A *draft*
is a guess of the next tokens; the step computes them as if they were known and samples at every position, with the
noise that the position always has. As long as the draw equals the draft, the next position was computed from the right
prefix, and its draw is what a separate step would have drawn. The first draw that differs is the answer there, and
everything computed behind it is thrown away. So the output is that of a run without drafts, token for token (coupled
sampling: Daliri, Musco and Suresh 2024), and a wrong guess costs time alone.
"""

from asyncengine.speculation.planner import DraftPlanner

__all__ = ["DraftPlanner"]
