"""Plans for models that carry none and have no table: :func:`derived_plan` is the only entry."""

from pipekernels.huggingface.derive.derivation import derived_plan

__all__ = ["derived_plan"]
