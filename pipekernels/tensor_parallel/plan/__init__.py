"""Shards whole models by a plan, and undoes it."""

from pipekernels.tensor_parallel.plan.providers import register_plan_provider
from pipekernels.tensor_parallel.plan.torch_layers import TorchLayers

register_plan_provider(TorchLayers())
