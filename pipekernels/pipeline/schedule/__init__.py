"""Who runs which micro-batch when, as data: programs, the simulator that times them, and the
timeline of what ran. Knows nothing of layers; the engine and the planner call in."""
