"""The systems whose collectives are compared: their ranks, in groups that take turns."""
