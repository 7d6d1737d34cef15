"""Private gradient accumulators for the parameters of a stage.

While a stage runs, each of its trainable parameters is replaced in its module by a *parameter
copy*: a leaf that shares the parameter's storage and version counter but has its own ``.grad`` and
hooks. The stage's backwards accumulate there, in autograd's own C++ code, and the pipe's single
autograd node returns the sums as the gradients of the parameters. So ``torch.autograd.grad`` does
not change ``.grad``, and a hook on a parameter is called once per backward, not per microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipekernels._torch_private import are_parametrizations_cached
from pipekernels.pipeline.engine.entry import PAST_THE_OUTPUT

Owner = dict[str, nn.Parameter | None]
"""The ``_parameters`` of a layer."""


def _make_copy(parameter: nn.Parameter) -> nn.Parameter:
    detached = parameter.detach()  # Of the parameter's class, if that is a subclass.
    plain = type(parameter) is nn.Parameter
    copy: Any = nn.Parameter(detached) if plain else detached.requires_grad_()
    copy.__dict__ = parameter.__dict__  # Shared: attributes that the user's code sets.
    return copy  # type: ignore[no-any-return]


def identity(parameter: nn.Parameter | None) -> int:
    """A number that a parameter has in common with all its copies."""
    return 0 if parameter is None else id(vars(parameter))  # Copies share its __dict__.


class Parameters:
    """The parameters of all stages, and copies of the trainable ones, at the time this object is
    made. A mini-batch owns its object from the forward to the end of its backward.

    Attributes:
        unique: the trainable parameters, each once.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        # Of each stage: layers with their classes, modes, pre-hooks and children.
        self._layers: list[list[tuple[nn.Module, type, bool, bool, list[Any]]]] = []
        # Of each layer's parameters: their ids, and what their copies have in common with them.
        self._ids: list[tuple[list[int], list[int]]] = []
        self._frozen: list[list[nn.Parameter]] = []  # By stage.
        # By stage, and by id of the parameter: it and its copy. Stages that share a parameter have
        # a copy each, so that no two workers accumulate into one.
        self._pairs: list[dict[int, tuple[nn.Parameter, nn.Parameter]]] = []
        # (parameter dict of a layer, name in it, parameter, copy)
        self._entries: list[tuple[Owner, str, nn.Parameter, nn.Parameter]] = []
        for stage in stages:
            pairs, frozen = self._add(stage)
            self._pairs.append(pairs)
            self._frozen.append(frozen)
        by_id = {key: pair[0] for pairs in self._pairs for key, pair in pairs.items()}
        self.unique = list(by_id.values())
        # Of each parameter whose copy has the same memory; module.to(dtype) changes it.
        self._memory = [(p, p.data_ptr(), p.dtype, p.shape, p.stride()) for p in self.unique]

    def _add(self, stage: nn.Module) -> tuple[dict[int, Any], list[nn.Parameter]]:
        pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        frozen, layers = [], []
        for layer in stage.modules():
            owner = layer._parameters
            hooked, children = bool(layer._forward_pre_hooks), list(layer._modules.values())
            layers.append((layer, type(layer), layer.training, hooked, children))
            self._ids.append(([*map(id, owner.values())], [*map(identity, owner.values())]))
            for name, parameter in owner.items():
                if parameter is None:
                    continue
                if not parameter.requires_grad:
                    frozen.append(parameter)
                    continue
                # Layers of one stage that share a parameter share the copy: they run in turn.
                if id(parameter) not in pairs:
                    pairs[id(parameter)] = parameter, _make_copy(parameter)
                self._entries.append((owner, name, *pairs[id(parameter)]))
        self._layers.append(layers)
        return pairs, frozen

    def changed_stage(self) -> int | None:
        """The first stage that has got other layers or parameters since, or other modes; None if
        there is none. Without calls, as every mini-batch asks."""
        ids = iter(self._ids)
        for stage, layers in enumerate(self._layers):
            for layer, layer_class, training, hooked, children in layers:
                own, (own_ids, identities) = layer._parameters.values(), next(ids)
                if (
                    layer.training is not training
                    or type(layer) is not layer_class
                    or bool(layer._forward_pre_hooks) is not hooked
                    or list(layer._modules.values()) != children
                    # Another mini-batch may have its copies there, with the same identities.
                    or ([*map(id, own)] != own_ids and [*map(identity, own)] != identities)
                ):
                    return stage
        return None

    def is_current(self) -> bool:
        """Whether an object made now would be the same."""
        # Beyond what changed_stage() looks at: other flags, or other memory behind a parameter.
        for parameter in chain.from_iterable(self._frozen):
            if parameter.requires_grad:
                return False
        for parameter, address, dtype, shape, stride in self._memory:
            if (
                not parameter.requires_grad
                or parameter.data_ptr() != address
                or parameter.dtype is not dtype
                or parameter.shape != shape
                or parameter.stride() != stride
            ):
                return False
        return self.changed_stage() is None

    def versions(self) -> list[list[int]]:
        """The version counters of all parameters, by stage."""
        stages = zip(self._pairs, self._frozen, strict=True)
        return [versions([*(copy for _, copy in own.values()), *frozen]) for own, frozen in stages]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the copies into the layers in the body. Afterwards the layers get back what they had:
        parameters, copies of another run, or what the user has put there since. RuntimeError in
        ``parametrize.cached()``, whose values belong to one graph."""
        if are_parametrizations_cached():
            raise RuntimeError(
                "torch.nn.utils.parametrize.cached() would give every microbatch the graph of the "
                "first; leave it away around forwards and backwards of a pipe, or evaluate under "
                "no_grad()"
            )
        # Another mini-batch of the pipe may have installed its copies: they come back at the end.
        before = [owner[name] for owner, name, _, _ in self._entries]
        addresses = [copy.data_ptr() for _, _, _, copy in self._entries]
        try:
            for owner, name, _, copy in self._entries:
                owner[name] = copy
            yield
        finally:
            for i, (owner, name, parameter, copy) in enumerate(self._entries):
                owner[name] = before[i]
                # Give parameters the memory that layers have assigned to them, here to the copies.
                if copy.data_ptr() != addresses[i]:
                    parameter.data = copy.data

    def keys(self) -> dict[int, int]:
        """By id of each copy, that of its parameter."""
        return {id(copy): key for pairs in self._pairs for key, (_, copy) in pairs.items()}

    def drop_accumulated(self) -> bool:
        """Drop what backwards other than the stages' have accumulated; returns whether there was
        anything."""
        accumulated = [copy for _, _, _, copy in self._entries if copy.grad is not None]
        for copy in accumulated:
            copy.grad = None
        return bool(accumulated)

    def deny_accumulated(self) -> None:
        """As :meth:`drop_accumulated`; a RuntimeError if there was anything."""
        if self.drop_accumulated():
            raise RuntimeError(PAST_THE_OUTPUT)

    def accumulated(self, of_losses: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Take the gradients that the copies have accumulated: one per parameter in ``unique``,
        summed over stages in their order, then ``of_losses``, by id of the parameter."""
        total: dict[int, torch.Tensor] = {}
        for pairs in self._pairs:
            for key, (_, copy) in pairs.items():
                # Taken: a mini-batch that reuses the copy must find no gradient there.
                grad, copy.grad = copy.grad, None
                if grad is not None:
                    add_to(total, key, grad)
        for key, grad in of_losses.items():
            add_to(total, key, grad)
        return [total.get(id(parameter)) for parameter in self.unique]


def add_to(total: dict[int, torch.Tensor], key: int, grad: torch.Tensor) -> None:
    """Add a gradient, sparse or dense, to that of ``key``."""
    earlier = total.get(key)
    if earlier is None:
        total[key] = grad
    else:
        # torch can add a sparse tensor to a dense one, not the other way round.
        total[key] = grad.add(earlier) if earlier.is_sparse else earlier.add(grad)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The version counters of ``tensors``, 0 for inference tensors."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
