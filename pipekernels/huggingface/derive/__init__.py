"""Plans for models that carry none, derived from small copies of them."""

from pipekernels.huggingface.derive.derived_plans import derived_plan

__all__ = ["derived_plan"]
