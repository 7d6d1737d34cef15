"""One process per stage: a pipeline along a dimension of a ``DeviceMesh``."""
