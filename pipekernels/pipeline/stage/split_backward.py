"""A graph's backward in two parts: gradients of its inputs first (I), of its parameters later (W).

The stage before waits for the former only, so putting the latter off fills bubbles (Qi et al., Zero
Bubble Pipeline Parallelism, 2023). The first part runs the graph for its inputs alone and keeps
what arrives at every node that consumes parameters; the second enters the graph again at each of
these nodes, for those parameters alone. Both run the operations of the plain backward, and every
parameter is accumulated once, so the gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node

from pipekernels.pipeline.stage.entry import is_custom

WeightBackward = Callable[[bool], None]
"""The second part; takes whether another backward may follow."""


class _Consumer:
    """A node on the way from the outputs to the inputs that also takes parameters: directly, or
    through nodes that lead to parameters alone (a transpose, a weight's normalisation)."""

    def __init__(self, node: Node, parameters: list[torch.Tensor]) -> None:
        self.node = node
        self._parameters = parameters
        self._grads: tuple[torch.Tensor | None, ...] = ()

    def capture(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """As a pre-hook of the node: keep what arrives."""
        self._grads = grads

    def backward(self, keep_graph: bool) -> None:
        """Accumulate into the parameters what :meth:`capture` kept."""
        arrived = [(i, grad) for i, grad in enumerate(self._grads) if grad is not None]
        if arrived:
            torch.autograd.backward(
                [GradientEdge(self.node, i) for i, _ in arrived],
                [grad for _, grad in arrived],
                retain_graph=keep_graph,
                inputs=self._parameters,
            )


def backward_of_inputs(
    roots: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
) -> WeightBackward | None:
    """Accumulate into ``leaves`` alone, and return what will accumulate into the parameters.

    Args:
        roots: where the graph's outputs were made.
        grads: their gradients.
        leaves: the graph's inputs that want gradients.

    Returns:
        The second part, or None if the graph cannot be cut in two; then nothing has been done. It
        cannot where a parameter is used twice, where an output does not depend on the inputs or
        no parameter is used, where there are custom functions, whose backward does everything at
        once, and where a node that consumes parameters has hooks, which would be called in both
        parts.
    """
    consumers = _consumers([root.node for root in roots], {id(leaf) for leaf in leaves})
    if not consumers or any(_has_hooks(consumer.node) for consumer in consumers):
        return None
    handles = [consumer.node.register_prehook(consumer.capture) for consumer in consumers]
    try:
        torch.autograd.backward(roots, grads, retain_graph=True, inputs=leaves)
    finally:
        for handle in handles:
            handle.remove()

    def backward_of_parameters(keep_graph: bool) -> None:
        for consumer in consumers:
            consumer.backward(keep_graph)

    return backward_of_parameters


def _consumers(roots: Sequence[Node], leaves: set[int]) -> list[_Consumer] | None:
    """The nodes that consume parameters, or None if the graph cannot be cut in two.

    Args:
        roots: nodes of the outputs.
        leaves: ids of the inputs that want gradients.
    """
    nodes = _children_first(roots)
    if nodes is None:
        return None
    leads_to_leaf: dict[Node, bool] = {}
    for node, children in nodes.items():
        variable = getattr(node, "variable", None)
        leads_to_leaf[node] = id(variable) in leaves or any(leads_to_leaf[c] for c in children)
    if not all(leads_to_leaf[root] for root in roots):
        return None
    consumers: list[_Consumer] = []
    taken: set[Node] = set()
    for node, children in reversed(nodes.items()):
        if not leads_to_leaf[node]:
            continue
        # What this node alone leads to, besides the inputs.
        branch = _children_first([child for child in children if not leads_to_leaf[child]]) or {}
        if not taken.isdisjoint(branch):
            return None
        taken.update(branch)
        parameters = [n.variable for n in branch if hasattr(n, "variable")]
        if parameters:
            consumers.append(_Consumer(node, parameters))
    return consumers


def _has_hooks(node: Node) -> bool:
    for register in (node.register_prehook, node.register_hook):
        with register(lambda *_: None) as handle:
            hooks = handle.hooks_dict_ref()  # All of the node.
            if hooks is not None and len(hooks) > 1:
                return True
    return False


def _children_first(roots: Sequence[Node]) -> dict[Node, list[Node]] | None:
    """Every node that ``roots`` lead to, with the nodes it leads to, which come before it; None if
    there are custom functions."""
    found: dict[Node, list[Node]] = {}
    open_: dict[Node, list[Node]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in found:
            stack.pop()
        elif node in open_:
            found[node] = open_.pop(node)
            stack.pop()
        else:
            if is_custom(node):
                return None
            children = [child for child, _ in node.next_functions if child is not None]
            open_[node] = children
            stack.extend(children)
    return found
