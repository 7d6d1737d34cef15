"""Demonstration in three acts: training through a pipe, generation on two ranks, all-reduces."""
