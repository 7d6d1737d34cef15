"""Whole models: which layers a plan shards how, and the way there and back."""

from pipekernels.tensor_parallel.plan.providers import register_plan_provider
from pipekernels.tensor_parallel.plan.torch_layers import TorchLayers

register_plan_provider(TorchLayers())
