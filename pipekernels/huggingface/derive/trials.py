"""Tries plans on a small copy: compares outputs and all gradients with the whole copy's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

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

    def is_kept_by(self, kinds: Mapping[str, str], divided: Mapping[str, Sequence[str]]) -> bool:
        """Whether the results are the same if the model is sharded over ``RANKS`` threads.

        Args:
            kinds: the plan; by patterns.
            divided: attributes to divide by the number of ranks; by patterns for their modules.
        """
        plan, owners = named(self.model, kinds), named(self.model, divided)
        models = [copy.deepcopy(self.model) for _ in range(RANKS)]

        def on_rank(comm: Communicator) -> bool:
            model = models[comm.rank]
            with comm:
                for name, keys in owners.items():
                    module = model.get_submodule(name)
                    for key in keys:
                        setattr(module, key, getattr(module, key) // RANKS)
                tensor_parallelize(model, plan, comm)
                return self._are_expected(self._results(model))

        # A rank that fails leaves its communicator, so its peers fail too and no thread waits for
        # ever.
        with ThreadPoolExecutor(RANKS) as pool:
            ranks = [pool.submit(on_rank, comm) for comm in Communicator.threads(RANKS)]
            try:
                return all(rank.result() for rank in ranks)
            except Exception:  # noqa: BLE001 - whatever the model raises for wrong sizes
                return False

    def _are_expected(self, found: Iterable[dict[Any, Tensor]]) -> bool:
        for expected, own in zip(self._expected, found, strict=True):
            for key, value in expected.items():
                bound = TOLERANCE[value.dtype] * value.abs().max().clamp_min(1e-6)
                if own[key].shape != value.shape or not (own[key] - value).abs().max() <= bound:
                    return False
        return True

    def _results(self, model: nn.Module) -> Iterator[dict[Any, Tensor]]:
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
            gradients = full_state_dict(model)
            for parameter, data in weights.items():
                parameter.data = data
            values: dict[Any, Tensor] = {i: o.detach() for i, o in enumerate(outputs)}
            yield values | {k: v.clone() for k, v in gradients.items() if v.is_floating_point()}
