"""Plans derived from a model, where it carries none and there is no table.

A small copy of the model (:mod:`~pipekernels.huggingface.derive.small_models`) runs once, and every
linear layer's output is replaced by random numbers that autograd treats as leaves. The gradient of
one feature of a linear layer's input then shows from which features of which layers it was made.
Features that depend on each other, directly or not, form a block: an attention head, or one
feature of an MLP. Where the layers of a group have the same blocks in the same order, the
blocks are divided among the ranks: layers that feed others become column-parallel, the layers that
they feed row-parallel.

Trials find the attributes that count heads: each group is sharded over two ranks, which are
threads, and its plan is taken only if outputs and all gradients equal those of the whole copy.
Other layers are column-parallel with gathered outputs.

Two layers need not represent the others. So the plan is tried again on a small copy with all layers
and other sizes, in evaluation and training, on one token and on a long text. The model itself must
be like this copy: :mod:`pipekernels.huggingface.derive.likeness`.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, product
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipekernels.huggingface.derive.likeness import (
    Description,
    check_alike,
    described,
    named,
    without_numbers,
)
from pipekernels.huggingface.derive.small_models import small_model
from pipekernels.huggingface.derive.trials import (
    Case,
    attributes_to_divide,
    cases_of,
    difference,
    results,
    tensors_of,
)
from pipekernels.tensor_parallel.full_layer import features_of, is_embedding, linear_classes
from pipekernels.tensor_parallel.plan.kinds import Kind, parse
from pipekernels.tensor_parallel.plan.sharding_plan import ShardingPlan

_log = logging.getLogger(__name__)

RANKS = 2
LEAST_FEATURES = 16
"""Least input and output features, in the small copy, of a layer that is sharded by itself."""
MOST_FEATURES = 3600
"""Most input features of all linear layers together: each takes a backward."""

Reached = dict[nn.Module, Tensor]  # By producer: bool, [its features] or [features, its features].


class Counter(NamedTuple):
    """Where models of other sizes hold the number of blocks of a group: in an attribute, or in the
    features of ``layer`` if the attribute is the size of a block, which the layer repeats."""

    owner: str
    attribute: str
    layer: str = ""
    repeats: int = 1

    def blocks(self, model: nn.Module, name: str) -> int:
        """The number of blocks in the group of the module ``name``."""

        def nearest(wild: str) -> Any:
            places = named(model, {wild: None})
            near = max(places, key=lambda place: len(commonprefix((place, name))))
            return model.get_submodule(near)

        value: int = getattr(nearest(self.owner), self.attribute)
        if not self.layer:
            return value
        layer = nearest(self.layer)
        return features_of(getattr(layer, "base_layer", layer))[1] // (value * self.repeats)


class Derived(NamedTuple):
    """A derived plan. Names have ``*`` in place of numbers."""

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


def derive(model_class: type[nn.Module], config: Any) -> Derived:
    """The plan for models of a class of transformers and a configuration, from small copies.

    Raises:
        ValueError: no small copy can be made or run.
    """
    # Whatever the caller's thread has set; and its random numbers stay as they are.
    clean = torch.inference_mode(False), torch.enable_grad(), torch.device("cpu")
    warnings = logging.getLogger("transformers")  # They would be about the small copy.
    with ExitStack() as stack:
        stack.callback(warnings.setLevel, warnings.level)
        warnings.setLevel(logging.ERROR)
        for context in (*clean, torch.random.fork_rng(devices=[])):
            stack.enter_context(context)
        torch.manual_seed(0)
        deep, _ = small_model(model_class, config, deep=True)
        return _derive(*small_model(model_class, config), deep)


def _derive(model: nn.Module, inputs: dict[str, Tensor], deep: nn.Module) -> Derived:
    found = Derived({}, {}, {}, {}, {}, described(deep))
    deep_cases = cases_of(deep)
    cases = [Case(False, inputs, results(copy.deepcopy(model), False, inputs))]
    flow = _Flow(copy.deepcopy(model), inputs)

    def reason_against(own: dict[str, str], blocks: _Blocks) -> str | None:
        """Tries kinds of a group on both copies; adds them to ``found`` if both agree."""
        plan, split = named(model, own), blocks.per_head(model)
        why: str | None = "nothing was tried"
        trials = attributes_to_divide(model, plan, blocks.count)
        for more, attributes in product([{}, split] if split else [{}], trials):
            why = difference(model, cases, plan | named(model, more), attributes, RANKS)
            if why is not None:
                continue
            # Right for this copy. The model itself must be able to count its blocks, and the copy
            # with all layers must agree.
            keys = {without_numbers(name): tuple(keys) for name, keys in attributes.items()}
            counter = blocks.counter(model, attributes)
            if blocks.size > 1 and counter is None:
                return f"it has blocks of {blocks.size} features, of which a rank might cut some"
            kinds = own | more
            why = difference(deep, deep_cases, named(deep, kinds), named(deep, keys), RANKS)
            if why is None:
                found.kinds.update(kinds)
                found.divided.update(keys)
                found.counters.update(dict.fromkeys(kinds, counter) if counter else {})
            return why
        return why

    # Equal layers of the copy, and of the model, have the same name without numbers, and one plan.
    for producers, consumers in flow.groups():
        layers = {without_numbers(flow.names[layer]) for layer in (*producers, *consumers)}
        shown = ", ".join(sorted(layers))
        if layers <= found.kinds.keys() or shown in found.refused:
            continue
        blocks = _Blocks(producers, consumers, flow)
        own = blocks.kinds()
        if own is None or any(found.kinds.get(name, kind) != kind for name, kind in own.items()):
            continue  # A layer may feed one group and be fed in another.
        why = reason_against(own | blocks.norms(model), blocks)
        if why is not None:
            found.refused[shown] = why
    found.gathered.update(_gathered(flow, found.kinds, deep, deep_cases))
    return found


def _gathered(
    flow: _Flow, planned: Mapping[str, str], deep: nn.Module, cases: Sequence[Case]
) -> dict[str, str]:
    """Kinds of wide layers in stacks that are not ``planned``: every rank gets the whole output."""

    def is_only_called(name: str) -> bool:  # Kernels for GPUs may take a layer's weight.
        owner, _, own = name.rpartition(".")
        try:
            source = inspect.getsource(type(flow.model.get_submodule(owner)))
        except (OSError, TypeError):  # Of a class without a file.
            return False
        return f".{own}.weight" not in source

    wide = [flow.names[x] for x in flow.sources if min(features_of(x)) >= LEAST_FEATURES]
    called = map(without_numbers, filter(is_only_called, wide))
    left = [name for name in called if "*" in name and name not in planned]
    kinds = dict.fromkeys(left, "column_gather_output")
    return kinds if difference(deep, cases, named(deep, kinds), {}, RANKS) is None else {}


class _Flow:
    """Which features of linear layers' inputs depend on which features of others' outputs. Raises
    ValueError for more than ``MOST_FEATURES``."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.model = model
        self.names = {m: n for n, m in model.named_modules() if type(m) in linear_classes()}
        self._inputs: dict[nn.Module, list[Tensor]] = defaultdict(list)
        self._leaves: list[Tensor] = []
        self._owners: list[nn.Module] = []
        hooks = [layer.register_forward_pre_hook(self._enter) for layer in self.names]
        hooks += [layer.register_forward_hook(self._leave) for layer in self.names]
        try:
            with torch.enable_grad():
                outputs = tensors_of(model(**inputs))
        finally:
            for hook in hooks:
                hook.remove()
        features = sum(x.shape[-1] for inputs in self._inputs.values() for x in inputs)
        if features > MOST_FEATURES:
            raise ValueError(f"the small copy has {features} features, more than {MOST_FEATURES}")
        # By layer, by those that feed it: bool, [its input features, their output features].
        self.sources = {layer: self._sources_of(inputs) for layer, inputs in self._inputs.items()}
        # Layers that reach an output without passing another linear layer stay whole.
        self._exposed: set[nn.Module] = set()
        for output in outputs:
            if output.requires_grad:
                self._exposed |= self._reached((output * torch.randn_like(output)).sum()).keys()

    def groups(self) -> Iterable[tuple[list[nn.Module], list[nn.Module]]]:
        """Layers that feed others, and all the layers that they feed."""
        fed: dict[nn.Module, list[nn.Module]] = defaultdict(list)
        for layer, sources in self.sources.items():
            for source in sources:
                fed[source].append(layer)
        seen: set[nn.Module] = set()
        for layer in self.sources:
            if layer in seen:
                continue
            # All that feed a consumer, and all that these feed, until there are no more. Dicts keep
            # the order.
            consumers = {layer: None}
            producers = dict.fromkeys(self.sources[layer])
            while True:
                more = {c: None for p in producers for c in fed[p]}
                wider = {p: None for c in more for p in self.sources[c]}
                if more.keys() <= consumers.keys() and wider.keys() <= producers.keys():
                    break
                consumers |= more
                producers |= wider
            seen |= consumers.keys()
            if producers and self._exposed.isdisjoint(producers):
                yield list(producers), list(consumers)

    def _enter(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._inputs[layer].append(arguments[0])

    def _leave(self, layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        # Random, so that no activation of a small model is zero everywhere.
        leaf = torch.randn_like(output, requires_grad=True)
        self._leaves.append(leaf)
        self._owners.append(layer)
        return leaf.clone()

    def _reached(self, scalar: Tensor) -> Reached:
        if not self._leaves:
            return {}
        grads = torch.autograd.grad(scalar, self._leaves, retain_graph=True, allow_unused=True)
        found: Reached = {}
        for layer, grad in zip(self._owners, grads, strict=True):
            if grad is not None:
                features = (grad.reshape(-1, grad.shape[-1]) != 0).any(0)
                found[layer] = found[layer] | features if layer in found else features
        return {layer: features for layer, features in found.items() if features.any()}

    def _sources_of(self, inputs: Sequence[Tensor]) -> Reached:
        found: Reached = {}
        for x in inputs:
            if not x.requires_grad:
                continue
            flat = x.reshape(-1, x.shape[-1])
            # A gradient for each feature; weights of the rows, so that none cancel out.
            weights = torch.randn(len(flat), dtype=flat.dtype)
            rows = [self._reached(weights @ flat[:, k]) for k in range(flat.shape[1])]
            for source in {source: None for row in rows for source in row}:
                none = torch.zeros(features_of(source)[1], dtype=torch.bool)
                matrix = torch.stack([row.get(source, none) for row in rows])
                found[source] = found[source] | matrix if source in found else matrix
        return found


class _Blocks:
    """The blocks of features of a group of layers: their ``count``, and as ``size`` the fewest
    features of a layer in one."""

    def __init__(
        self, producers: Sequence[nn.Module], consumers: Sequence[nn.Module], flow: _Flow
    ) -> None:
        self._flow = flow
        self._producers, self._consumers = producers, consumers
        # Features of all layers as one row of nodes, joined where one depends on the other.
        starts: dict[tuple[nn.Module, bool], int] = {}
        total = 0
        for layers, is_input in ((consumers, True), (producers, False)):
            for layer in layers:
                starts[layer, is_input] = total
                total += features_of(layer)[0 if is_input else 1]
        # Union-find (Tarjan, 1975), with the first node of a block as its root.
        block_of = list(range(total))

        def find(node: int) -> int:
            while block_of[node] != node:
                block_of[node] = block_of[block_of[node]]
                node = block_of[node]
            return node

        for consumer in consumers:
            for producer, matrix in flow.sources[consumer].items():
                first, second = starts[consumer, True], starts[producer, False]
                for k, j in matrix.nonzero().tolist():
                    a, b = find(first + k), find(second + j)
                    block_of[max(a, b)] = min(a, b)
        roots = dict.fromkeys(map(find, range(total)))  # In the order of the first consumer.
        number = {root: i for i, root in enumerate(roots)}
        self.count = len(roots)
        # By layer, and whether its input or its output: the block of each feature.
        self._of: dict[tuple[nn.Module, bool], list[int]] = {}
        for (layer, is_input), start in starts.items():
            width = features_of(layer)[0 if is_input else 1]
            self._of[layer, is_input] = [number[find(start + i)] for i in range(width)]
        self.size = min(min(self._runs(key)) for key in self._of)

    def kinds(self) -> dict[str, str] | None:
        """By names without numbers; None if the blocks cannot be divided among ranks."""
        if self.count < RANKS or self.count % RANKS:
            return None
        found: dict[str, str] = {}
        for layer in self._producers:
            sizes = self._sizes(self._of[layer, False])
            if sizes is None or len(set(sizes)) > 1:
                return None  # Unequal ones would have other sizes in the model itself.
            kind = "column" if len(sizes) == 1 else f"packed_column:{len(sizes)}"
            found[without_numbers(self._flow.names[layer])] = kind
        for layer in self._consumers:
            if self._sizes(self._of[layer, True]) != [len(self._of[layer, True])]:
                return None
            found[without_numbers(self._flow.names[layer])] = "row"
        return found

    def norms(self, model: nn.Module) -> dict[str, str]:
        """Kinds of modules beside the producers whose parameters all heads share, such as norms of
        queries and keys."""
        found = {}
        size = len(self._of[self._consumers[0], True]) // self.count  # Of one head or several.
        for layer in self._producers:
            name = self._flow.names[layer].rpartition(".")[0]
            for child, module in model.get_submodule(name).named_children():
                shapes = [tuple(parameter.shape) for parameter in module.parameters()]
                is_shared = all(len(shape) == 1 and size % shape[0] == 0 for shape in shapes)
                if shapes and is_shared and not isinstance(module, linear_classes()):
                    found[without_numbers(f"{name}.{child}")] = "replicated_with_grad_allreduce"
        return found

    def counter(self, model: nn.Module, divided: Mapping[str, Sequence[str]]) -> Counter | None:
        """How the model itself, of other sizes, counts its blocks: by an attribute to divide, or as
        heads of a known size. None if that is not known, or they are single features."""
        if self.size == 1:
            return None
        for owner, keys in divided.items():
            for key in keys:
                if getattr(model.get_submodule(owner), key) == self.count:
                    return Counter(without_numbers(owner), key)
        for layer in self._producers:
            name = without_numbers(self._flow.names[layer])
            runs = self._runs((layer, False))
            for depth in (1, 2):  # Some wrap a linear layer.
                owner = ".".join(self._flow.names[layer].split(".")[:-depth])
                for key, value in vars(model.get_submodule(owner)).items():
                    if "head" in key and value == self.size == min(runs):
                        place = without_numbers(owner)
                        return Counter(place, key, name, len(runs) // self.count)
        return None

    def _runs(self, key: tuple[nn.Module, bool]) -> list[int]:
        """How many features of each block follow one another in a layer."""
        return [len(list(same)) for _, same in groupby(self._of[key])]

    def per_head(self, model: nn.Module) -> dict[str, str]:
        """Kinds of modules whose parameters may have an element for each head: owners of producers,
        and embeddings beside or around these, which may be biases of positions."""
        found = {}
        for layer in self._producers:
            owner = self._flow.names[layer].rpartition(".")[0]
            shapes = [p.shape for p in model.get_submodule(owner).parameters(recurse=False)]
            sizes = [next((size for size in shape if size > 1), 1) for shape in shapes]
            if sizes and not any(size % self.count for size in sizes):
                found[without_numbers(owner)] = "split_parameters"
            for name, module in model.named_modules():
                is_around = f"{owner}.".startswith(f"{name.rpartition('.')[0]}.")
                if is_around and is_embedding(module) and module.embedding_dim == self.count:
                    found[without_numbers(name)] = "split_output"
        return found

    def _sizes(self, blocks: Sequence[int]) -> list[int] | None:
        """Sizes of the layers that are fused into one: each has every block once, in order, all of
        one size. None if the layer is not so."""
        runs = [(block, len(list(same))) for block, same in groupby(blocks)]
        fused, rest = divmod(len(runs), self.count)
        if rest or [block for block, _ in runs] != list(range(self.count)) * fused:
            return None
        sizes = []
        for i in range(fused):
            own = {size for _, size in runs[i * self.count : (i + 1) * self.count]}
            if len(own) > 1:
                return None
            sizes.append(own.pop() * self.count)
        return sizes


_known: dict[tuple[type[nn.Module], str], Derived] = {}
_lock = threading.Lock()  # Held while one is derived: ranks may be threads.


def derived_plan(model: Any, config: Any) -> ShardingPlan:
    """The derived plan for a model of transformers; empty if nothing of it can be sharded.

    Raises:
        ValueError: the model is not like its small copy.
    """
    key = type(model), config.to_json_string(use_diff=False)
    with _lock:
        if key not in _known:
            try:
                _known[key] = derive(type(model), config)
            except ValueError as error:
                _log.info("no plan is derived for %s: %s", type(model).__name__, error)
                _known[key] = Derived({}, {}, {}, {}, {}, {})
        derived = _known[key]
    for layers, why in derived.refused.items():
        _log.info("%s of %s are not in blocks to share: %s", layers, type(model).__name__, why)
    kinds = named(model, derived.kinds)
    check_alike(model, derived.copy, kinds)
    counts = {n: c.blocks(model, n) for n, c in named(model, derived.counters).items()}
    heads = {name: (count, count) for name, count in counts.items()}
    words = kinds | named(model, derived.gathered)
    by_name = {name: parse(word) or Kind(word) for name, word in words.items()}
    return ShardingPlan(by_name, heads, named(model, derived.divided))
