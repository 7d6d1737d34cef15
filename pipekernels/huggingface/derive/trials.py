"""Tries plans on a small copy: compares outputs and all gradients with those of the whole copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.huggingface.derive.flow import named
from pipekernels.huggingface.derive.small_models import tensors_of
from pipekernels.tensor_parallel.plan.parallelize import tensor_parallelize
from pipekernels.tensor_parallel.state import full_state_dict

RANKS = 2
TOLERANCE = {torch.float64: 2**-22, torch.float32: 1e-3}
"""Tolerated difference, as a share of the largest magnitude. Sums are in another order, and many
models of float64 compute some in float32: four units in its last place."""


class SmallCopy:
    """A small copy of a model, with the outputs and gradients that a plan must not change.

    Args:
        model: the copy, which stays as it is.
        inputs: what it is tried on, in evaluation and in training.

    Raises:
        ValueError: ``model`` does not run.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Mapping[str, Tensor]]) -> None:
        self.model = model
        self._cases = list(product((False, True), inputs))
        try:
            self._expected = [*self._results(copy.deepcopy(model))]
        except Exception as error:
            raise ValueError(f"the small copy fails: {error}") from error

    def difference(
        self, kinds: Mapping[str, str], divided: Mapping[str, Sequence[str]]
    ) -> str | None:
        """How the results differ if the model is sharded over ``RANKS`` threads; None if not.

        Args:
            kinds: the plan; by patterns.
            divided: attributes to divide by the number of ranks; by patterns for their modules.
        """
        plan, owners = named(self.model, kinds), named(self.model, divided)
        models = [copy.deepcopy(self.model) for _ in range(RANKS)]

        def on_rank(comm: Communicator) -> str | None:
            model = models[comm.rank]
            with comm:
                for name, keys in owners.items():
                    module = model.get_submodule(name)
                    for key in keys:
                        setattr(module, key, getattr(module, key) // RANKS)
                tensor_parallelize(model, plan, comm)
                return self._difference(self._results(model))

        # A rank that fails leaves its communicator, so its peers fail too and no thread waits for
        # ever.
        with ThreadPoolExecutor(RANKS) as pool:
            ranks = [pool.submit(on_rank, comm) for comm in Communicator.threads(RANKS)]
            try:
                return next(filter(None, [rank.result() for rank in ranks]), None)
            except Exception as error:  # noqa: BLE001 - whatever the model raises for wrong sizes
                return f"{type(error).__name__}: {error}"

    def _difference(self, found: Iterable[dict[str, Tensor]]) -> str | None:
        for (training, _), expected, values in zip(self._cases, self._expected, found, strict=True):
            for key, value in expected.items():
                if values[key].shape != value.shape:
                    return f"{key} has the shape {tuple(values[key].shape)}"
                bound = TOLERANCE[value.dtype] * value.abs().max().clamp_min(1e-6)
                if not (values[key] - value).abs().max() <= bound:
                    return f"{key} differs{' in training' if training else ''}"
        return None

    def _results(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """The outputs, and the gradients and buffers of the full model. Made one by one, as a wrong
        plan is mostly seen in the first ones."""
        for training, inputs in self._cases:
            model.train(training).zero_grad()
            outputs = tensors_of(model(**inputs))
            torch.stack([o.square().mean() for o in outputs if o.requires_grad]).sum().backward()
            # Gradients in place of weights for a moment, so that the full state gathers them.
            weights = {parameter: parameter.data for parameter in model.parameters()}
            for parameter in weights:
                grad = parameter.grad
                parameter.data = torch.zeros_like(parameter) if grad is None else grad
            gradients = {f"the gradient of {k}": v for k, v in full_state_dict(model).items()}
            for parameter, data in weights.items():
                parameter.data = data
            values = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
            values |= {k: v.clone() for k, v in gradients.items() if v.is_floating_point()}
            yield values
