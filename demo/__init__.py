"""Demonstration in three acts: training in two stages, generation on two ranks, all-reduces."""
