"""Skip connections of a pipe's layers."""

from pipekernels.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
