"""A graph's backward in two parts: gradients of its inputs first (I), of its parameters later (W).

The previous stage waits for the first part only, so the second can fill bubbles (Qi et al., Zero
Bubble Pipeline Parallelism, 2023). The first part computes gradients of the inputs alone and keeps
the gradients that arrive at every node that consumes parameters; the second continues from these
nodes to their parameters alone. Together they run the operations of the plain backward, and every
parameter is accumulated once, so the gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from pipekernels._torch_private import function_of, run_backward
from pipekernels.pipeline.engine.entry import StageInput

WeightBackward = Callable[[bool], None]
"""Runs the second part; its argument says whether another backward may follow."""


_Consumer = tuple[Node, list[torch.Tensor]]
"""A node between outputs and inputs, and parameters that it also consumes: directly, or through
nodes that lead to parameters alone (a transpose, a weight's normalisation)."""


def backward_of_inputs(
    roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> WeightBackward | None:
    """Run the first part: accumulate gradients into ``leaves``, the inputs that want them, alone.

    Returns:
        The second part, or None if the graph cannot be cut in two; then nothing has been done.
        That is the case if a parameter is used twice or no parameter is used, an output does not
        depend on the inputs, there are custom functions, whose backward computes all gradients at
        once, or a node that consumes parameters has hooks, which would be called in both parts.
    """
    consumers = _consumers([root.node for root in roots], {id(leaf) for leaf in leaves})
    if not consumers or any(_has_hooks(node) for node, _ in consumers):
        return None
    # Pre-hooks see the gradients that arrive at a consumer, from which the second part goes on.
    captured: dict[int, tuple[torch.Tensor | None, ...]] = {}
    handles = [
        node.register_prehook(partial(captured.__setitem__, index))
        for index, (node, _) in enumerate(consumers)
    ]
    try:
        run_backward(roots, grads, keep_graph=True, inputs=leaves)  # The second part needs it.
    finally:
        for handle in handles:
            handle.remove()

    def backward_of_parameters(keep_graph: bool) -> None:
        for index, (node, parameters) in enumerate(consumers):
            arrived = enumerate(captured.get(index, ()))
            rooted = [(GradientEdge(node, i), grad) for i, grad in arrived if grad is not None]
            if rooted:
                node_roots, node_grads = zip(*rooted, strict=True)
                run_backward(node_roots, node_grads, keep_graph=keep_graph, inputs=parameters)

    return backward_of_parameters


def _consumers(roots: Sequence[Node], leaves: set[int]) -> list[_Consumer] | None:
    """The nodes that consume parameters, or None if the graph cannot be cut in two; ``leaves`` are
    the ids of the inputs that want gradients."""
    nodes = _children_first(roots)
    if nodes is None:
        return None
    # Children come first, so what they lead to is known.
    leads_to_leaf: dict[Node, bool] = {}
    for node, children in nodes.items():
        variable = getattr(node, "variable", None)
        leads_to_leaf[node] = id(variable) in leaves or any(leads_to_leaf[c] for c in children)
    if not all(leads_to_leaf[root] for root in roots):
        return None
    # A node on the way to a leaf consumes the parameters of the branches that leave the way there.
    # Two consumers must not share a branch: the second part would accumulate it twice.
    consumers: list[_Consumer] = []
    visited: set[Node] = set()
    for node, children in reversed(nodes.items()):
        if not leads_to_leaf[node]:
            continue
        branch = _children_first([child for child in children if not leads_to_leaf[child]]) or {}
        if not visited.isdisjoint(branch):
            return None
        visited.update(branch)
        parameters = [n.variable for n in branch if hasattr(n, "variable")]
        if parameters:
            consumers.append((node, parameters))
    return consumers


def _has_hooks(node: Node) -> bool:
    for register in (node.register_prehook, node.register_hook):
        with register(lambda *_: None) as handle:
            hooks = handle.hooks_dict_ref()  # All hooks of the node, not only this one.
            if hooks is not None and len(hooks) > 1:
                return True
    return False


def _children_first(roots: Sequence[Node]) -> dict[Node, list[Node]] | None:
    """Every node of the graph of ``roots`` with its children, ordered children first; None if there
    are custom functions."""
    found: dict[Node, list[Node]] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, are_children_found = stack.pop()
        if node in found:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if are_children_found:
            found[node] = children
        elif function_of(node) not in (None, StageInput):
            return None
        else:
            stack += [(node, True), *((child, False) for child in children)]
    return found


class HookWatch(TorchFunctionMode):
    """Notes whether the calling thread puts hooks on tensors, which both parts would call."""

    def __init__(self) -> None:
        super().__init__()
        self.has_seen_hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        registers = func in (torch.Tensor.register_hook, torch.Tensor.retain_grad)
        self.has_seen_hooks = self.has_seen_hooks or registers
        return func(*args, **(kwargs or {}))
