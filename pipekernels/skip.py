"""Skip connections of a pipe's layers; see :mod:`pipekernels.pipeline.stage.skip`."""

from pipekernels.pipeline.stage.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
