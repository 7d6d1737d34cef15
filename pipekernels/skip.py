"""Skip connections of a pipe's layers; see :mod:`pipekernels.pipeline.skip`."""

from pipekernels.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
