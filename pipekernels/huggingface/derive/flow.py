"""Which features of linear layers are computed from which others.

A small model runs once, and every linear layer's output is replaced by random numbers that autograd
treats as leaves. The gradient of one feature of a linear layer's input then shows from which
features of which layers it was computed. Features that depend on each other, directly or not, form
a block: an attention head, or one feature of an MLP.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import combinations, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipekernels.tensor_parallel.full_layer import features_of, is_embedding, linear_classes

Value = TypeVar("Value")


def pattern_of(name: str) -> str:
    """``name`` with ``*`` in place of numbers, but for a last one inside of a numbered layer, which
    may number a linear layer in ``nn.Sequential``."""
    *outer, last = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join([*outer, name.rpartition(".")[2] if "*" in outer else last])


def named(model: nn.Module, values: Mapping[str, Value]) -> dict[str, Value]:
    """``values``, whose names have ``*``, by the full names of modules in ``model``."""
    names = {name: pattern_of(name) for name, _ in model.named_modules()}
    return {name: values[wild] for name, wild in names.items() if wild in values}


class Flow:
    """From which features of which layers' outputs the inputs of linear layers are computed.

    Attributes:
        model: the small model, which runs once.
        layers: its linear layers by name.
        sources: of the first two layers of each pattern, by those that feed them: bool, [input
            features, output features of the other].
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.model = model
        self.layers = {n: m for n, m in model.named_modules() if type(m) in linear_classes()}
        names = {layer: name for name, layer in self.layers.items()}
        first: dict[str, list[str]] = defaultdict(list)
        for name in self.layers:
            first[pattern_of(name)].append(name)
        studied = {name for alike in first.values() for name in alike[:2]}
        entered: dict[str, list[Tensor]] = defaultdict(list)
        self._leaves: list[tuple[str, Tensor]] = []

        def enter(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
            if names[layer] in studied:
                entered[names[layer]].append(arguments[0])

        def leave(layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            # Random, so that no activation of a small model is zero everywhere.
            leaf = torch.randn_like(output, requires_grad=True)
            self._leaves.append((names[layer], leaf))
            return leaf.clone()

        with ExitStack() as hooks:
            for layer in names:
                hooks.enter_context(layer.register_forward_pre_hook(enter))
                hooks.enter_context(layer.register_forward_hook(leave))
            model(**inputs)
        self.sources = {name: self._sources_of(tensors) for name, tensors in entered.items()}

    def groups(self) -> list[Group]:
        """Layers that feed others, with all the layers that they feed."""
        found: list[tuple[dict[str, None], dict[str, None]]] = []  # Dicts keep the order.
        for name, sources in self.sources.items():
            joined = [group for group in found if not group[0].keys().isdisjoint(sources)]
            if not joined:
                joined = [({}, {})]
                found += joined
            producers, consumers = joined[0]
            for other in joined[1:]:
                producers |= other[0]
                consumers |= other[1]
                found.remove(other)
            producers |= dict.fromkeys(sources)
            consumers[name] = None
        return [Group(self, *group) for group in found if group[0]]

    def _sources_of(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        leaves = [leaf for _, leaf in self._leaves]
        for x in tensors:
            if not x.requires_grad:
                continue
            columns = x.reshape(-1, x.shape[-1]).T
            # A gradient for each feature; weights of the rows, so that none cancel out.
            weights = torch.randn(columns.shape[1], dtype=x.dtype)
            for k, column in enumerate(columns):
                grads = torch.autograd.grad(
                    weights @ column, leaves, retain_graph=True, allow_unused=True
                )
                for (name, leaf), grad in zip(self._leaves, grads, strict=True):
                    if grad is not None and grad.any():
                        none = torch.zeros(len(columns), leaf.shape[-1], dtype=torch.bool)
                        features = (grad.reshape(-1, grad.shape[-1]) != 0).any(0)
                        found.setdefault(name, none)[k] |= features
        return found


class Group:
    """Layers that feed others, all the layers that they feed, and the blocks of their features.

    Attributes:
        layers: their names, as patterns (:func:`pattern_of`).
        count: how many blocks there are.
        size: the fewest features of a layer in one.
    """

    def __init__(self, flow: Flow, producers: Iterable[str], consumers: Iterable[str]) -> None:
        self._model = flow.model
        self._producers, self._consumers = list(producers), list(consumers)
        self.layers = {pattern_of(name) for name in (*producers, *consumers)}
        # The features of all layers in a row, consumers first. Each feature gets the least number
        # of the features that it depends on, directly or not.
        widths = {(name, True): features_of(flow.layers[name])[0] for name in consumers}
        widths |= {(name, False): features_of(flow.layers[name])[1] for name in producers}
        total = sum(widths.values())
        numbers = torch.arange(total)
        by_layer = dict(zip(widths, numbers.split([*widths.values()]), strict=True))
        before = None
        while before is None or not numbers.equal(before):
            before = numbers.clone()
            for consumer in self._consumers:
                for producer, matrix in flow.sources[consumer].items():
                    a, b = by_layer[consumer, True], by_layer[producer, False]
                    least = torch.where(matrix, torch.minimum(a[:, None], b), total)
                    a.copy_(torch.minimum(a, least.amin(1)))
                    b.copy_(torch.minimum(b, least.amin(0)))
        blocks, numbers = numbers.unique(return_inverse=True)
        self.count = len(blocks)
        # By layer, and whether its input or its output: blocks, and how many features of each
        # follow one another.
        self._runs = {
            key: [(block, len(list(same))) for block, same in groupby(part.tolist())]
            for key, part in zip(widths, numbers.split([*widths.values()]), strict=True)
        }
        self.size = min(size for runs in self._runs.values() for _, size in runs)

    def kinds(self, ranks: int) -> dict[str, str] | None:
        """By patterns; None if the blocks cannot be divided among ranks."""
        if self.count < ranks or self.count % ranks:
            return None
        fused = {name: self._fused(self._runs[name, False]) for name in self._producers}
        fed = [self._fused(self._runs[name, True]) for name in self._consumers]
        if 0 in fused.values() or set(fed) != {1}:
            return None
        found = {
            pattern_of(name): "column" if count == 1 else f"packed_column:{count}"
            for name, count in fused.items()
        }
        return found | dict.fromkeys(map(pattern_of, self._consumers), "row")

    def _fused(self, runs: list[tuple[int, int]]) -> int:
        """How many layers are fused into one, each of which has every block once, in order, all of
        one size; 0 if the layer is not so."""
        fused = len(runs) // self.count
        in_order = [block for block, _ in runs] == list(range(self.count)) * fused
        return fused if in_order and len({size for _, size in runs}) == 1 else 0

    def _owners(self, *layers: str) -> dict[str, nn.Module]:
        """The modules around ``layers``."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in layers)
        return {name: self._model.get_submodule(name) for name in names}

    def norms(self) -> dict[str, str]:
        """Kinds of modules beside the producers whose parameters all heads share, such as norms of
        queries and keys."""
        found = {}
        # Of one head or several.
        size = sum(own for _, own in self._runs[self._consumers[0], True]) // self.count
        for name, owner in self._owners(*self._producers).items():
            for child, module in owner.named_children():
                shapes = [tuple(parameter.shape) for parameter in module.parameters()]
                is_shared = all(len(shape) == 1 and size % shape[0] == 0 for shape in shapes)
                if shapes and is_shared and not isinstance(module, linear_classes()):
                    found[pattern_of(f"{name}.{child}")] = "replicated_with_grad_allreduce"
        return found

    def per_head(self) -> dict[str, str]:
        """Kinds of modules whose parameters may have an element for each head: owners of producers,
        and embeddings beside or around these, which may be biases of positions; and of owners that
        take such a bias (ALiBi)."""
        found = {}
        for name, owner in self._owners(*self._producers).items():
            shapes = [parameter.shape for parameter in owner.parameters(recurse=False)]
            sizes = [next((size for size in shape if size > 1), 1) for shape in shapes]
            if sizes and not any(size % self.count for size in sizes):
                found[pattern_of(name)] = "split_parameters"
            if "alibi" in inspect.signature(owner.forward).parameters:
                found[pattern_of(name)] = "split_alibi"
            for other, module in self._model.named_modules():
                is_around = f"{name}.".startswith(f"{other.rpartition('.')[0]}.")
                if is_around and is_embedding(module) and module.embedding_dim == self.count:
                    found[pattern_of(other)] = "split_output"
        return found

    def attributes(self) -> list[dict[str, list[str]]]:
        """What to try in turn, by patterns: attributes with numbers of heads, of their features."""
        # The layers' owners may hold a number of heads, of features of all heads, or of neither.
        features = {sum(size for _, size in runs) for runs in self._runs.values()}
        if features == {self.count}:
            return [{}]  # Each feature by itself: there are no heads.
        heads, sizes = set[str](), set[str]()
        owners = self._owners(*self._producers, *self._consumers)
        for owner in owners.values():
            for key, value in vars(owner).items():
                if type(value) is int and value > 1 and value % self.count == 0:
                    if "head" in key and not any(word in key for word in ("dim", "size")):
                        heads.add(key)
                    elif value in features - {self.count}:
                        sizes.add(key)
        # All that count heads or none, with up to two that count features, fewest first.
        return [
            {pattern_of(n): own for n, o in owners.items() if (own := sorted(keys & set(vars(o))))}
            for count in range(3)
            for some in combinations(sorted(sizes), count)
            for keys in ((heads | set(some), set(some)) if heads else (set(some),))
        ]
