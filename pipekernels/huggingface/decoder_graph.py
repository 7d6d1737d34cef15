"""What makes the program of a decoder layer fast: how attention of one query is computed, products
that are joined, and where their weights lie."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipekernels.ops.weights.integers import TILE

_HUGE_PAGE = 2 << 20  # bytes


def decompose_attention(graph: fx.Graph) -> None:
    """Write attention of one query per head as products and sums, which the compiler fuses: torch's
    kernel, made for blocks of queries, takes 1.3 to 8 times as long."""
    names = "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        query, mask = given["query"].meta["example_value"], given.get("attn_mask")
        others = given.get("dropout_p") or given.get("is_causal") or given.get("enable_gqa")
        if query.shape[-2] > 1 or others:
            continue
        # Summed in float32, as torch's kernel does.
        with graph.inserting_before(node):
            proxy: Any = partial(fx.Proxy, tracer=fx.proxy.GraphAppendingTracer(graph))
            wide = torch.promote_types(query.dtype, torch.float32)
            q, k, v = (proxy(given[name]).to(wide) for name in names[:3])
            scale = given.get("scale") or query.shape[-1] ** -0.5
            scores = (q * k).sum(-1) * (proxy(scale) if isinstance(scale, fx.Node) else scale)
            if mask is not None:
                row = proxy(mask).squeeze(-2)
                is_bool = mask.meta["example_value"].dtype == torch.bool
                scores = torch.where(row, scores, -math.inf) if is_bool else scores + row
            weights = torch.softmax(scores, -1).unsqueeze(-1)
            result = (weights * v).sum(-2, keepdim=True).to(query.dtype)
        node.replace_all_uses_with(result.node)
        graph.erase_node(node)


def join_products(graph: fx.Graph, inputs: list[Any]) -> list[list[int]]:
    """Make one product of those that share their input, such as queries, keys and values. Of each
    group of inputs that are joined, by place, the first one is to receive them all."""
    product = torch.ops.pipekernels.linear
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    # By input, and by whether they have scales and biases.
    alike: dict[Any, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=product):
        x, *operands, _ = node.args
        alike.setdefault((x, *(each is None for each in operands)), []).append(node)
    groups = []
    for nodes in alike.values():
        # Weights, scales and so on: each column can be joined if nothing else uses them.
        *columns, sizes = zip(*(node.args[1:] for node in nodes), strict=True)
        columns = [each for each in columns if each[0]]
        are_own = all(each in places and len(each.users) == 1 for each in chain(*columns))
        if len(nodes) == 1 or not are_own or not _fit(columns, sizes, inputs, places):
            continue
        for column in columns:
            group = [places[each] for each in column]
            inputs[group[0]] = torch.cat([inputs[place] for place in group])
            groups.append(group)
        with graph.inserting_before(nodes[0]):
            y = graph.call_function(product, (*nodes[0].args[:-1], sum(sizes)))
            for node, size, end in zip(nodes, sizes, accumulate(sizes), strict=True):
                part = graph.call_function(torch.narrow, (y, -1, end - size, size))
                node.replace_all_uses_with(graph.call_method("contiguous", (part,)))
        for node in nodes:
            graph.erase_node(node)
    return groups


def _fit(
    columns: Sequence[Any], sizes: Sequence[int], inputs: list[Any], places: dict[fx.Node, int]
) -> bool:
    """Whether tensors that follow each other are one; weights of integers must end with whole
    tiles."""
    shapes = [{inputs[places[each]].shape[1:] for each in column} for column in columns]
    are_tiles = len(columns) > 1 and inputs[places[columns[0][0]]].dim() == 3
    return all(len(each) == 1 for each in shapes) and not (
        are_tiles and any(size % TILE for size in sizes[:-1])
    )


class Memory:
    """Holds a layer's tensors in huge pages, where the system has them, and a group's tensors one
    after another. Products then read their weights up to 1.2 times as fast."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._addresses: list[list[int]] | None = None
        self._joined: list[Tensor | None] = []

    def join(self, groups: list[list[Tensor]]) -> list[Tensor]:
        """Each group as one tensor: a copy, if its tensors cannot be moved."""
        addresses = [[tensor.data_ptr() for tensor in group] for group in groups]
        if addresses != self._addresses:
            with torch.inference_mode(False):
                self._joined = self._move(groups)
            self._addresses = [[tensor.data_ptr() for tensor in group] for group in groups]
        pairs = zip(groups, self._joined, strict=True)
        return [torch.cat(group) if joined is None else joined for group, joined in pairs]

    def _move(self, groups: list[list[Tensor]]) -> list[Tensor | None]:
        grouped = set(map(id, chain(*groups)))
        tensors = chain(self.layer.parameters(), self.layer.buffers())
        runs = [*groups, *([tensor] for tensor in tensors if id(tensor) not in grouped)]
        size = sum(tensor.nbytes for tensor in chain(*runs)) + 64 * len(runs) + _HUGE_PAGE
        pages = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)

        def at(start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
            flat = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=start)
            return flat.view(shape)

        end = -at(0, torch.uint8, [1]).data_ptr() % _HUGE_PAGE
        joined: list[Tensor | None] = []
        for run in runs:
            start = end = -(-end // 64) * 64
            if not all(map(_is_movable, run)):
                joined.append(None)
                continue
            for tensor in run:
                tensor.data = at(end, tensor.dtype, tensor.shape).copy_(tensor.detach())
                end += tensor.nbytes
            if len(joined) < len(groups):
                shape = sum(map(len, run)), *run[0].shape[1:]
                joined.append(at(start, run[0].dtype, shape))
        return joined[: len(groups)]


def _is_movable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()
    return is_plain and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
