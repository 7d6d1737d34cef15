"""Schedules as data, a simulator that predicts their times, and timelines of actual runs. Does not
depend on layers; used by the engine."""
