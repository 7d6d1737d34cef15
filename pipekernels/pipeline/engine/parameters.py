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
from typing import Any

import torch
from torch import nn

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


class Layers:
    """The layers of all stages, and what they are and have, at the time this object is made."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        every = [list(stage.modules()) for stage in stages]
        # Of each layer, its dict, and a copy that keeps the parameters and so their ids.
        self.parameters = [[(x._parameters, {**x._parameters}) for x in stage] for stage in every]
        self.every_parameter = [p for stage in stages for p in stage.parameters()]
        self._layers = [layer for stage in every for layer in stage]
        self._classes = [*map(type, self._layers)]
        self._modes = [layer.training for layer in self._layers]
        self._children = [[*layer._modules.values()] for layer in self._layers]
        # Keys of hooks, which are never used again.
        self._hooks = [[*x._forward_pre_hooks, *x._forward_hooks] for x in self._layers]
        self._names = [[*layer._parameters.keys()] for layer in self._layers]
        self._ids = [[*map(id, layer._parameters.values())] for layer in self._layers]
        self._identities = [[*map(identity, x._parameters.values())] for x in self._layers]

    def have_changed(self, *, with_hooks: bool = False) -> bool:
        """Whether layers, their modes or their parameters have changed, or ``with_hooks`` also
        their hooks, which recomputations may have others of."""
        layers = self._layers
        return (
            [layer.training for layer in layers] != self._modes
            or [*map(type, layers)] != self._classes
            or [[*layer._modules.values()] for layer in layers] != self._children
            or with_hooks
            and [[*x._forward_pre_hooks, *x._forward_hooks] for x in layers] != self._hooks
            or [[*layer._parameters.keys()] for layer in layers] != self._names
            # The copies of another mini-batch may be there, inside whose backward autograd's thread
            # has begun this one; they have the same identities.
            or [[*map(id, layer._parameters.values())] for layer in layers] != self._ids
            and [[*map(identity, x._parameters.values())] for x in layers] != self._identities
        )


class Parameters:
    """Copies of the trainable parameters of ``layers``, at the time this object is made. A
    mini-batch owns its object from the forward to the end of its backward.

    Attributes:
        frozen: the parameters that are not trainable.
        unique: the trainable ones, each once.
        tensors: both, as layers have them while the copies are installed.
        memory: what :meth:`memory_now` returned when this object was made.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.frozen: list[nn.Parameter] = []
        # By stage, and by id of the parameter: it and its copy. Stages that share a parameter have
        # a copy each, so that the order of a sum does not depend on which stages run as one.
        self._pairs: list[dict[int, tuple[nn.Parameter, nn.Parameter]]] = []
        # (parameter dict of a layer, name in it, parameter, copy)
        self._entries: list[tuple[Owner, str, nn.Parameter, nn.Parameter]] = []
        for stage in layers.parameters:
            pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
            for owner, named in stage:
                for name, parameter in named.items():
                    if parameter is None:
                        continue
                    if not parameter.requires_grad:
                        self.frozen.append(parameter)
                        continue
                    # Layers of one stage that share a parameter share the copy.
                    if id(parameter) not in pairs:
                        pairs[id(parameter)] = parameter, _make_copy(parameter)
                    self._entries.append((owner, name, *pairs[id(parameter)]))
            self._pairs.append(pairs)
        by_id = {key: pair[0] for pairs in self._pairs for key, pair in pairs.items()}
        self.unique = list(by_id.values())
        self.tensors = [*self.frozen, *(copy for _, _, _, copy in self._entries)]
        self.memory = self.memory_now()

    def memory_now(self) -> list[Any]:
        """What copies take from their parameters, now; module.to(dtype) changes it."""
        named = [(p.requires_grad, p.data_ptr(), p.dtype, p.shape, p.stride()) for p in self.unique]
        return [*named, *(p.requires_grad for p in self.frozen)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the copies into the layers in the body. Afterwards the layers get back what they had:
        parameters, copies of another run, or what the user has put there since."""
        # Another mini-batch may have installed its copies (Engine): they come back at the end.
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
        """The id of the parameter, by the id of its copy."""
        return {id(copy): key for pairs in self._pairs for key, (_, copy) in pairs.items()}

    def drop_accumulated(self) -> None:
        """Drop what the copies have accumulated."""
        for _, _, _, copy in self._entries:
            copy.grad = None

    def deny_accumulated(self) -> None:
        """RuntimeError if backwards other than the stages' have accumulated anything, which is
        dropped."""
        if any(copy.grad is not None for _, _, _, copy in self._entries):
            self.drop_accumulated()
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
                    total[key] = added(total[key], grad) if key in total else grad
        for key, grad in of_losses.items():
            total[key] = added(total[key], grad) if key in total else grad
        return [total.get(id(parameter)) for parameter in self.unique]


def added(earlier: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, sparse or dense."""
    # torch can add a sparse tensor to a dense one, not the other way round.
    return grad.add(earlier) if earlier.is_sparse else earlier.add(grad)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The version counters of ``tensors``, 0 for inference tensors."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
