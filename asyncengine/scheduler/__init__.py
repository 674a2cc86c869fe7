"""Pure scheduling: queues, policies, admission, preemption. No await, no torch."""

from asyncengine.scheduler.output import Counters, Output
from asyncengine.scheduler.scheduler import Scheduler

__all__ = ["Counters", "Output", "Scheduler"]
