"""Derives a plan from small copies of a model.

Where the layers of a group have the same blocks of features in the same order
(:mod:`~pipekernels.huggingface.derive.flow`), the blocks are divided among the ranks: layers that
feed others become column-parallel, the layers that they feed row-parallel.

Trials find the attributes that count heads: each group is sharded over two ranks, which are
threads, and its plan is taken only if outputs and all gradients equal those of the whole copy.
Other layers are column-parallel with gathered outputs.

Two layers need not represent the others. So the plan is tried again on a small copy with all layers
and other sizes, in evaluation and training, on one token and on a long text.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipekernels.huggingface.derive.flow import Flow, Group
from pipekernels.huggingface.derive.likeness import Description, described, named, pattern_of
from pipekernels.huggingface.derive.small_models import small_model
from pipekernels.huggingface.derive.trials import (
    RANKS,
    Case,
    attributes_to_divide,
    cases_of,
    difference,
    results,
)
from pipekernels.tensor_parallel.full_layer import features_of

LEAST_FEATURES = 16
"""Least input and output features, in the small copy, of a layer that is sharded by itself."""


class Counter(NamedTuple):
    """Where models of other sizes hold the number of blocks of a group: in an attribute, or in the
    features of ``layer`` if the attribute is the size of a block, which the layer repeats."""

    owner: str
    attribute: str
    layer: str = ""
    repeats: int = 1

    def blocks(self, model: nn.Module, name: str) -> int:
        """The number of blocks in the group of the module ``name``."""

        def nearest(pattern: str) -> Any:
            places = named(model, {pattern: None})
            near = max(places, key=lambda place: len(commonprefix((place, name))))
            return model.get_submodule(near)

        value: int = getattr(nearest(self.owner), self.attribute)
        if not self.layer:
            return value
        layer = nearest(self.layer)
        return features_of(getattr(layer, "base_layer", layer))[1] // (value * self.repeats)


class Derivation(NamedTuple):
    """The plan of a class of models and a configuration. Names are patterns."""

    kinds: dict[str, str]
    divided: dict[str, tuple[str, ...]]
    counters: dict[str, Counter]
    """By modules whose features are in blocks of several, which ranks hold whole."""
    refused: dict[str, str]
    """By groups of layers that ranks cannot share by blocks: why."""
    gathered: dict[str, str]
    """Kinds of layers that are in no such group, or in one that is refused."""
    copy: Description
    """Of the small copy with all layers."""


def derive(model_class: type[nn.Module], config: Any) -> Derivation:
    """The plan for models of a class of transformers and a configuration, from small copies.

    Raises:
        ValueError: no small copy can be made or run.
    """
    warnings = logging.getLogger("transformers")  # They would be about the small copy.
    with ExitStack() as stack:
        stack.callback(warnings.setLevel, warnings.level)
        warnings.setLevel(logging.ERROR)
        # Whatever the caller's thread has set; and its random numbers stay as they are.
        for context in (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
            torch.random.fork_rng(devices=[]),
        ):
            stack.enter_context(context)
        deep, _ = small_model(model_class, config, deep=True)
        return _derive(*small_model(model_class, config), deep)


def _derive(model: nn.Module, inputs: dict[str, Tensor], deep: nn.Module) -> Derivation:
    found = Derivation({}, {}, {}, {}, {}, described(deep))
    deep_cases = cases_of(deep)
    cases = [Case(False, inputs, results(copy.deepcopy(model), False, inputs))]
    flow = Flow(copy.deepcopy(model), inputs)

    def reason_against(kinds: dict[str, str], group: Group) -> str | None:
        """Tries kinds of a group on both copies; adds them to ``found`` if both agree."""
        plan, per_head = named(model, kinds), group.per_head()
        why: str | None = "nothing was tried"
        trials = attributes_to_divide(model, plan, group.count)
        for more, attributes in product([{}, per_head] if per_head else [{}], trials):
            why = difference(model, cases, plan | named(model, more), attributes)
            if why is not None:
                continue
            # Right for this copy. The model itself must be able to count its blocks, and the copy
            # with all layers must agree.
            divided = {pattern_of(name): tuple(keys) for name, keys in attributes.items()}
            counter = _counter(model, group, attributes) if group.size > 1 else None
            if group.size > 1 and counter is None:
                return f"it has blocks of {group.size} features, of which a rank might cut some"
            whole = kinds | more
            why = difference(deep, deep_cases, named(deep, whole), named(deep, divided))
            if why is None:
                found.kinds.update(whole)
                found.divided.update(divided)
                found.counters.update(dict.fromkeys(whole, counter) if counter else {})
            return why
        return why

    # Equal layers of the copy, and of the model, have the same pattern, and one plan.
    for group in flow.groups():
        shown = ", ".join(sorted(group.layers))
        kinds = group.kinds(RANKS)
        if group.layers <= found.kinds.keys() or shown in found.refused or kinds is None:
            continue
        if any(found.kinds.get(name, kind) != kind for name, kind in kinds.items()):
            continue  # A layer may feed one group and be fed in another.
        why = reason_against(kinds | group.norms(), group)
        if why is not None:
            found.refused[shown] = why
    found.gathered.update(_gathered(flow, found.kinds, deep, deep_cases))
    return found


def _counter(
    model: nn.Module, group: Group, divided: Mapping[str, Sequence[str]]
) -> Counter | None:
    """How the model itself, of other sizes, counts the blocks: by an attribute to divide, or as
    heads of a known size. None if that is not known."""
    for owner, keys in divided.items():
        for key in keys:
            if getattr(model.get_submodule(owner), key) == group.count:
                return Counter(pattern_of(owner), key)
    of_size = group.head_size()
    return of_size and Counter(*of_size)


def _gathered(
    flow: Flow, planned: Mapping[str, str], deep: nn.Module, cases: Sequence[Case]
) -> dict[str, str]:
    """Kinds of wide layers in stacks that are not ``planned``: every rank gets the whole output."""

    def is_only_called(name: str) -> bool:  # Kernels for GPUs may take a layer's weight.
        owner, _, own = name.rpartition(".")
        try:
            source = inspect.getsource(type(flow.model.get_submodule(owner)))
        except (OSError, TypeError):  # Of a class without a file.
            return False
        return f".{own}.weight" not in source

    wide = [name for name in flow.sources if min(features_of(flow.layers[name])) >= LEAST_FEATURES]
    called = map(pattern_of, filter(is_only_called, wide))
    left = [name for name in called if "*" in name and name not in planned]
    kinds = dict.fromkeys(left, "column_gather_output")
    return kinds if difference(deep, cases, named(deep, kinds), {}) is None else {}
