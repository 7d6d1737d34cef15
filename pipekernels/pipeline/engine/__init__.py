"""One mini-batch, from the call of a pipe to its last gradient. Called by ``Pipe``."""
