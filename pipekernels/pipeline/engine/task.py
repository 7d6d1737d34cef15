"""One stage, or several in a row, on one microbatch: forward, recomputation, backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipekernels._torch_private import PythonNode, run_backward
from pipekernels.pipeline.context import NOTHING, during, recomputing
from pipekernels.pipeline.engine.entry import StageInput, copy_of
from pipekernels.pipeline.engine.parameters import Parameters, versions
from pipekernels.pipeline.engine.split_backward import WeightBackward, backward_of_inputs
from pipekernels.pipeline.microbatch import Activation, Grads
from pipekernels.pipeline.nested import Arguments, flatten
from pipekernels.pipeline.partition import layers
from pipekernels.pipeline.skip import Key, carried, skips_of

Seed = Callable[[int, int], object]
"""Seeds a stage's forward, given the stage and the microbatch."""

Values = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
"""By id and version of a buffer: it, and a copy of that version."""


class Buffer(NamedTuple):
    owner: dict[str, Any]  # The `_buffers` of its layer.
    name: str
    value: torch.Tensor


def _buffers(layers: Sequence[nn.Module]) -> list[Buffer]:
    """Those that require no gradient: graphs must use the others themselves, not copies."""
    return [
        Buffer(layer._buffers, name, value)
        for layer in layers
        for name, value in layer._buffers.items()
        if value is not None and not value.requires_grad
    ]


def buffers_now(layers: Sequence[nn.Module], values: Values) -> list[Buffer]:
    """The buffers of ``layers`` with copies of their present values, from ``values``, where
    microbatches share them."""
    found = _buffers(layers)
    keys = [(id(each.value), versions([each.value])[0]) for each in found]
    for key, each in zip(keys, found, strict=True):
        if key not in values:
            values[key] = each.value, each.value.clone()
    return [each._replace(value=values[key][1]) for key, each in zip(keys, found, strict=True)]


@contextmanager
def buffers_of_forward(layers: Sequence[nn.Module], saved: Sequence[Buffer]) -> Iterator[None]:
    """Have ``layers`` use copies of their buffers in the body, with the values of ``saved``, before
    the forward, which has already updated the buffers."""
    values = {(id(owner), name): value for owner, name, value in saved}
    present = _buffers(layers)
    copies: dict[int, torch.Tensor] = {}  # Layers may share buffers.
    try:
        for owner, name, buffer in present:
            value = values.get((id(owner), name), buffer)
            owner[name] = copies.setdefault(id(value), value.clone())
        yield
    finally:
        for owner, name, buffer in present:
            owner[name] = buffer


Root = GradientEdge | torch.Tensor


@dataclass(slots=True)
class SavedGraph:
    """What a forward keeps for its backward.

    ``roots`` are graph edges, not tensors, so that an output's memory can be freed before the
    backward; a parameter that the stage returns is its own root. A checkpointed forward has
    ``inputs`` and ``nodes`` instead of leaves and roots.
    """

    leaves: Sequence[torch.Tensor | None] = ()
    # Those of the leaves. Empty but during a backward, so that StageInput can tell any other one.
    grads: list[torch.Tensor | None] = field(default_factory=list)
    roots: Sequence[Root | None] = ()
    inputs: Activation | None = None
    nodes: Sequence[type] = ()  # Classes of the nodes of a checkpointed forward.
    received: tuple[Key, ...] = ()  # Keys of the skips among the inputs, the last of `leaves`.
    sent: tuple[Key, ...] = ()  # Keys of the skips among the outputs, the last of `roots`.
    outputs: int = 0  # Number of output tensors without skips.
    sources: Sequence[torch.device] = ()  # Where gradients of inputs go, if to other devices.
    buffers: Sequence[Buffer] = ()  # Before a checkpointed forward, for its recomputation.
    versions: Sequence[int] = ()  # Those of `inputs`, before the forward.


def _root(tensor: torch.Tensor) -> Root | None:
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        return tensor
    if isinstance(node, PythonNode):
        # Freed unless something owns it. The edge does, by its ownership_token, which torch 2.6
        # lacks: there keep the tensor.
        return get_gradient_edge(tensor) if "ownership_token" in GradientEdge._fields else tensor
    return GradientEdge(node, tensor.output_nr)


def _may_modify_inputs(layer: nn.Module) -> bool:
    """Whether a layer or one of its forward hooks might modify its input in place. torch's own
    layers do so only if they have ``inplace=True``."""
    return bool(
        getattr(layer, "inplace", False)
        or layer._forward_pre_hooks
        or layer._forward_hooks
        or not type(layer).__module__.startswith("torch.nn.")
    )


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer always makes the same graph, but for shapes, with each of its parameters
    once: torch's own without hooks, save where lengths or torch's settings choose operations."""
    is_own = type(layer).__module__.startswith("torch.nn.modules.") and "forward" not in vars(layer)
    varies = isinstance(layer, (nn.RNNBase, nn.MultiheadAttention))
    return is_own and not (varies or layer._forward_pre_hooks or layer._forward_hooks)


class Task:
    """Runs consecutive stages of one device as one :class:`SavedGraph` per microbatch.

    Args:
        stages: the stages' layers.
        first: index of the first stage.
        device: the device of the stages and of their inputs.
        received, sent: skips that come from, and go to, other tasks.
    """

    def __init__(
        self,
        stages: Sequence[nn.Sequential],
        first: int,
        device: torch.device,
        received: Sequence[Key] = (),
        sent: Sequence[Key] = (),
    ) -> None:
        self.stages = list(enumerate(stages, first))
        last = first + len(stages) - 1
        self.name = f"stage {first}" if first == last else f"stages {first} to {last}"
        self.device = device
        self.received_skips = tuple(received)
        self.sent_skips = tuple(sent)
        self._has_skips = any(skips_of(stage) for stage in stages)
        # Microbatches are views of the caller's tensors, which layers must not modify in place:
        # autograd would not know, and the views share one version counter.
        self._is_first = first == 0
        self.layers = [layer for _, stage in self.stages for layer in stage.modules()]
        # If layers might overwrite their inputs, they get copies where inputs must not change.
        self.may_overwrite = any(map(_may_modify_inputs, self.layers))
        # Whether every graph is the same, but for shapes, and uses each parameter once.
        every = [p for stage in stages for _, p in stage.named_parameters(remove_duplicate=False)]
        is_once = len(set(map(id, every))) == len(every)
        is_dense = all(type(parameter) is nn.Parameter for parameter in every)
        self.is_plain = is_once and is_dense and all(map(_is_plain, self.layers))

    def forward(
        self,
        inputs: Activation,
        seed: Seed,
        m: int,
        *,
        parameters: Parameters | None = None,
        preserve: bool = False,
        direct: bool = False,
    ) -> tuple[Activation, SavedGraph]:
        """Run the layers on microbatch ``m``; returns their outputs, and what a backward needs.

        Args:
            inputs: detached, on the device of the stages.
            seed: called before each stage.
            parameters: what a graph that begins at ``inputs`` accumulates into; its outputs are
                detached. None: without a graph.
            preserve: whether ``inputs`` must keep their values.
            direct: run in the caller's graph.
        """
        tensors = inputs.tensors
        if self.may_overwrite and (preserve or self._is_first) and not direct:
            tensors = tuple([copy_of(tensor) for tensor in tensors])
        n = len(tensors) - len(inputs.skips)
        leaves: list[torch.Tensor | None] = []
        grads: list[torch.Tensor | None] = []
        carrying: AbstractContextManager[Any] = NOTHING
        has_graph = parameters is not None
        with NOTHING if direct else torch.set_grad_enabled(has_graph):
            # The graph begins at leaves of its own; its backward leaves their gradients in `grads`.
            args = list(tensors)
            if parameters is not None:
                for i, wants in enumerate(inputs.wants_grad):
                    leaf = tensors[i].detach().requires_grad_() if wants else None
                    leaves.append(leaf)
                    if leaf is not None:
                        args[i] = StageInput.apply(leaf, grads, i, parameters.drop_accumulated)
            # Layers pop skips from, and stash them to, this dict; a skip may be None.
            if self._has_skips:
                received = dict(zip(inputs.skips, args[n:], strict=True))
                carrying = carried(dict.fromkeys(self.received_skips) | received)
            value = inputs.structure.build(args[:n])
            with carrying as skips:
                for index, stage in self.stages:
                    seed(index, m)
                    value = _spread(stage, value) if type(value) is Arguments else stage(value)
                    outputs, structure = flatten(value, f"the output of stage {index}")
        # Skips leave with the outputs, detached: the next stage's graph does not lead to this one.
        sent = tuple([key for key in self.sent_skips if skips[key] is not None])
        outputs = (*outputs, *[skips[key] for key in sent])
        if direct:
            return Activation(outputs, (), structure), SavedGraph()
        roots = [_root(tensor) for tensor in outputs] if has_graph else [None] * len(outputs)
        graph = SavedGraph(
            leaves,
            grads,
            roots,
            received=inputs.skips,
            sent=sent,
            outputs=len(outputs) - len(sent),
            sources=inputs.sources,
        )
        wants_grad = tuple([root is not None for root in roots])
        detached = tuple([tensor.detach() for tensor in outputs]) if has_graph else outputs
        return Activation(detached, wants_grad, structure, sent), graph

    def recompute(
        self, graph: SavedGraph, seed: Seed, m: int, parameters: Parameters
    ) -> SavedGraph:
        """Run the layers a second time on the graph's inputs, now with a graph. Buffers and inputs
        keep their values. RuntimeError if an input has changed, or the graph differs from the
        forward's."""
        inputs = graph.inputs
        assert inputs is not None
        if versions(inputs.tensors) != graph.versions:
            raise RuntimeError(
                f"an input of stage {self.stages[0][0]} was modified in place after the stage was "
                "given it, and checkpointing needs it to recompute the stage; modify a copy, or "
                "use checkpoint='never'"
            )
        # The previous stage's inputs may share memory with these, and another recomputation follow.
        has_buffers = any(layer._buffers for layer in self.layers)
        replaced = buffers_of_forward(self.layers, graph.buffers) if has_buffers else NOTHING
        with during(recomputing), replaced:
            _, recomputed = self.forward(inputs, seed, m, parameters=parameters, preserve=True)
        nodes = self.nodes_of(recomputed)
        if nodes != graph.nodes:
            raise RuntimeError(
                f"the recomputation of {self.name} made a graph of {len(nodes)} nodes "
                f"that differs from its forward's, of {len(graph.nodes)}: a layer "
                "chooses what it computes by something that changes between the two; choose by "
                "the inputs or by numbers of torch's default generators, or use checkpoint='never'"
            )
        return recomputed

    def nodes_of(self, graph: SavedGraph) -> list[type]:
        """The classes of all nodes of ``graph``, in one order for equal graphs; none if all graphs
        of the task are equal."""
        if self.is_plain:
            return []
        stack = [root.node for root in reversed(graph.roots) if isinstance(root, GradientEdge)]
        seen = set()
        types: list[type] = []
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                types.append(type(node))
                stack += [child for child, _ in node.next_functions if child is not None]
        return types

    def backward(self, graph: SavedGraph, grads: Grads, keep_graph: bool) -> Grads:
        """Accumulate into the parameter copies. ``grads``: of the outputs; returns the gradients of
        the inputs."""
        graph.grads[:] = [None] * len(graph.leaves)
        pairs = zip(graph.roots, grads, strict=True)
        rooted = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        try:
            if rooted:
                run_backward(*zip(*rooted, strict=True), keep_graph=keep_graph)
            return tuple(graph.grads)
        finally:  # Another backward may use the graph of one that failed.
            graph.grads.clear()

    def backward_of_inputs(
        self, graph: SavedGraph, grads: Grads, keep_graph: bool
    ) -> tuple[Grads, WeightBackward | None]:
        """Run the backward's first part; returns the gradients of the inputs and the second part,
        which accumulates into the parameter copies. It is None if the whole backward was run."""
        leaves = [leaf for leaf in graph.leaves if leaf is not None]
        pairs = zip(graph.roots, grads, strict=True)
        rooted = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
        if leaves and rooted and all(isinstance(root, GradientEdge) for root, _ in rooted):
            graph.grads[:] = [None] * len(graph.leaves)
            roots, root_grads = zip(*rooted, strict=True)
            second_part = backward_of_inputs(roots, root_grads, leaves)
            if second_part is not None:
                result = tuple(graph.grads)
                graph.grads.clear()
                return result, second_part
        return self.backward(graph, grads, keep_graph), None


def _spread(stage: nn.Sequential, value: Arguments) -> Any:
    """``stage`` of several arguments."""
    first, *rest = layers(stage)  # children() lists a repeated layer only once.
    result = first(*value.args, **value.kwargs)
    for layer in rest:
        result = layer(result)
    return result
