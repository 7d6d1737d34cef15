"""Models of Hugging Face's libraries: plans, adapters, loading and saving, training, generation."""

from pipekernels.huggingface.adapters import Peft, add_adapters
from pipekernels.huggingface.decoding import compile_decoding
from pipekernels.huggingface.load import load_pretrained
from pipekernels.huggingface.plans import Transformers
from pipekernels.huggingface.trainer import TrainerMixin, adapt_accelerator
from pipekernels.tensor_parallel.plan.sharding_plan import register_plan_provider

__all__ = [
    "TrainerMixin",
    "adapt_accelerator",
    "add_adapters",
    "compile_decoding",
    "load_pretrained",
]

register_plan_provider(Transformers())
register_plan_provider(Peft())
