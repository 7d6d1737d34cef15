"""Tries a plan on a small model: compares outputs and all gradients with the whole model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.huggingface.derive.small_models import running_inputs, tensors_of
from pipekernels.tensor_parallel.full_layer import features_of, linear_classes
from pipekernels.tensor_parallel.plan.parallelize import tensor_parallelize
from pipekernels.tensor_parallel.state import full_state_dict

RANKS = 2
LENGTHS = (1, 60)
"""Of the texts on which a model is tried; a decoder's later steps have one token."""
TOLERANCE = {torch.float64: 2**-22, torch.float32: 1e-3}
"""Tolerated difference, as a share of the largest magnitude. Sums are in another order, and many
models of float64 compute some in float32: four units in its last place."""

MOST_TRIALS = 24
"""Most choices of attributes to divide, for one group of layers."""


class Case(NamedTuple):
    """A mode and an input of a whole model, with the results."""

    training: bool
    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]


def cases_of(model: nn.Module) -> list[Case]:
    """Evaluation and training on inputs of all ``LENGTHS``.

    Raises:
        ValueError: ``model`` does not run, or gives other results the second time.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    own, second = copy.deepcopy(model), copy.deepcopy(model)
    try:
        found = [running_inputs(model, dtype, length) for length in LENGTHS]
        modes = [(training, inputs) for training in (False, True) for inputs in found]
        cases = [Case(*mode, results(own, *mode)) for mode in modes]
    except Exception as error:
        raise ValueError(f"the small copy with all layers fails: {error}") from error
    if _difference(cases, [results(second, *mode) for mode in modes]):
        raise ValueError("the small copy draws random numbers in its forward")
    return cases


def attributes_to_divide(
    model: nn.Module, plan: Mapping[str, str], blocks: int
) -> list[dict[str, list[str]]]:
    """What to try in turn, by names of modules: numbers of heads and of their features."""
    # The layers' owners may hold a number of heads, of features of all heads, or of neither.
    heads, sizes, features = set[str](), set[str](), {blocks}
    owners: dict[str, nn.Module] = {}
    for name, kind in plan.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, linear_classes()):
            continue
        features.add(features_of(layer)[0 if kind == "row" else 1])
        parent = name.rpartition(".")[0]
        owners[parent] = model.get_submodule(parent)
    if min(features) == blocks and len(features) == 1:
        return [{}]  # Each feature by itself: there are no heads.
    for owner in owners.values():
        for key, value in vars(owner).items():
            if type(value) is int and value > 1 and value % blocks == 0:
                if "head" in key and not any(word in key for word in ("dim", "size")):
                    heads.add(key)
                elif value in features - {blocks}:
                    sizes.add(key)
    # All that count heads or none, with up to two that count features, fewest first.
    return [
        {name: own for name, owner in owners.items() if (own := sorted(keys & vars(owner).keys()))}
        for count in range(3)
        for some in combinations(sorted(sizes), count)
        for keys in ((heads | set(some), set(some)) if heads else (set(some),))
    ][:MOST_TRIALS]


def difference(
    model: nn.Module,
    cases: Sequence[Case],
    plan: Mapping[str, str],
    divided: Mapping[str, Sequence[str]],
) -> str | None:
    """How the model differs when it is sharded over ``RANKS`` threads; None if it does not.

    Args:
        model: the whole model.
        cases: of it.
        plan: of ``tensor_parallelize``; by names.
        divided: by names of modules, attributes to divide by the number of ranks.
    """
    copies = [copy.deepcopy(model) for _ in range(RANKS)]

    def on_rank(comm: Communicator, own: nn.Module) -> str | None:
        with comm:
            for name, keys in divided.items():
                module = own.get_submodule(name)
                for key in keys:
                    setattr(module, key, getattr(module, key) // RANKS)
            tensor_parallelize(own, plan, comm)
            return _difference(cases, [results(own, c.training, c.inputs) for c in cases])

    # A rank that fails leaves its communicator, so its peers fail too and no thread waits for ever.
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = [
            pool.submit(on_rank, comm, own)
            for comm, own in zip(Communicator.threads(RANKS), copies, strict=True)
        ]
        try:
            return next(filter(None, [rank.result() for rank in ranks]), None)
        except Exception as error:  # noqa: BLE001 - whatever the model raises for wrong sizes
            return f"{type(error).__name__}: {error}"


def _difference(cases: Sequence[Case], found: Sequence[Mapping[str, Tensor]]) -> str | None:
    for case, values in zip(cases, found, strict=True):
        for key, value in case.expected.items():
            if values[key].shape != value.shape:
                return f"{key} has the shape {tuple(values[key].shape)}"
            bound = TOLERANCE[value.dtype] * value.abs().max().clamp_min(1e-6)
            if not (values[key] - value).abs().max() <= bound:
                return f"{key} differs{' in training' if case.training else ''}"
    return None


def results(model: nn.Module, training: bool, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, and the gradients and buffers of the full model."""
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
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return found | {k: v.clone() for k, v in gradients.items() if v.is_floating_point()}
