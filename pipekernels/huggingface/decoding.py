"""``generate`` with compiled decoder layers.

A step of greedy decoding multiplies a few rows: it takes as long as reading the weights, plus the
time of Python between the products. transformers compiles this step on GPUs only, and as one
program of all layers, which takes minutes on a CPU. Here each decoder layer is a program, and equal
layers share one, as in *regional compilation* of torch's tutorials. Checks that the compiler's
dispatch repeats for each token, at the cost of all small operations, run once per prompt:

* which layers share a program, and whether one has changed (:class:`_Program`, :func:`_signature`);
* which tensors of the layer, of its cache and of the call a program takes (:class:`_Replay`);
* where its weights lie, see :class:`_Memory`.

Each layer gets its own cache, since its index in a shared one would be a constant of the program.
"""

from __future__ import annotations

import contextlib
import copy
import math
import mmap
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipekernels._torch_private import inductor
from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.changes import set_attribute

_HUGE_PAGE = 2 << 20  # bytes
_Programs = dict[tuple[Any, ...], "_Program"]


def compile_decoding(model: nn.Module, max_length: int | None = None) -> nn.Module:
    """Compile the decoder layers of a transformers model for ``generate`` on CPUs, and let
    ``generate`` keep keys and values in a static cache.

    The compiled layers process one new token per sequence, without gradients; everything else,
    such as the prompt, runs as before. The first token waits for the compiler, tens of seconds on a
    cold disk cache (``TORCHINDUCTOR_CACHE_DIR``), and so does the first token after layers change.
    Tokens equal those of the uncompiled model, up to rounding.
    :func:`~pipekernels.tensor_parallel.tensor_unparallelize` undoes this.

    Args:
        model: a transformers decoder, sharded or not. Every rank calls this.
        max_length: tokens, prompt included, that fit into the cache. A longer text, or another
            batch size, compiles once more. Each step attends to the whole cache.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` cannot be compiled layer by layer, or is on a GPU, where ``generate``
            compiles by itself with ``cache_implementation="static"``; or torch is older than 2.10.
        RuntimeError: from the compiler, while generating: a layer cannot be compiled alone, or
            does more with a cache than append to it.
    """
    programs: _Programs = {}
    for layer in _decoder_layers(model):
        if not isinstance(layer.forward, _Step):
            set_attribute(layer, "forward", _Step(layer, programs))
    generating: Any = model
    _Memory(generating.get_output_embeddings() or nn.Module()).join([])
    config = generating.generation_config
    config.cache_implementation = "static"
    config.max_cache_len = max_length
    config.disable_compile = True  # Of all layers as one program.
    return model


def _decoder_layers(model: Any) -> list[nn.Module]:
    name = type(model).__name__
    if not hasattr(model, "generation_config") or not model.can_generate():
        raise ValueError(
            f"compile_decoding takes a transformers model that generates; {name} does not"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise ValueError(f"compile_decoding needs torch 2.10 or newer; this is {torch.__version__}")
    if model.device.type != "cpu":
        raise ValueError(
            f"compile_decoding is for CPUs, and the model is on {model.device}; there pass "
            'cache_implementation="static" to generate(), which compiles by itself'
        )
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = [
        module
        for module in model.get_decoder().modules()
        if isinstance(module, GradientCheckpointingLayer) and _index(module) is not None
    ]
    if model.config.is_encoder_decoder or not model._can_compile_fullgraph or not layers:
        raise ValueError(
            f"{name} cannot be compiled by layers: that takes a decoder alone, which transformers "
            "can compile with a static cache, and which has attention in each layer; generate() "
            "without compile_decoding"
        )
    return layers


def _index(layer: nn.Module) -> int | None:
    """The index of the layer's keys and values in a cache."""
    found = (vars(module).get("layer_idx") for module in layer.modules())
    return next((index for index in found if index is not None), None)


def _tensors_of(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def _state(layer: nn.Module) -> tuple[Any, ...]:
    return *_signature(layer), *map(id, _tensors_of(layer))


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """All that a layer's program depends on: equal layers differ in tensor values only."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        found += name, type(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            found += key, tensor is None or (tensor.dtype, tensor.shape, tensor.stride())
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                found += key, key != "layer_idx" and value
            elif isinstance(value, Communicator):
                found += key, value.handle
            else:
                found += key, getattr(value, "_attn_implementation", None)
    return tuple(found)


class _Program:
    """The compiled ``forward`` of equal layers."""

    def __init__(self, layer: nn.Module) -> None:
        # Without the wrapper that all classes share, and with code of its own, since it is by the
        # code that the compiler finds programs.
        f = getattr(type(layer).forward, "__wrapped__", type(layer).forward)
        own = FunctionType(f.__code__.replace(), f.__globals__, None, f.__defaults__, f.__closure__)
        own.__kwdefaults__ = f.__kwdefaults__
        options: Any = {"guard_filter_fn": _guards_of_arguments}
        self._forward: Callable[..., Any] = torch.compile(
            own, fullgraph=True, backend=self._compile, options=options
        )
        self._keeps_state: bool | None = None  # Known after the first call.
        self._thread = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Program:
        return self

    def _compile(self, graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        _decompose_attention(graph.graph)
        groups = _join_products(graph.graph, inputs)
        graph.recompile()
        code = inductor(graph, inputs, {"size_asserts": False})

        def run(*given: Any) -> Any:
            joined = self._thread.memory.join([[given[i] for i in group] for group in groups])
            inputs = list(given)
            for group, tensor in zip(groups, joined, strict=True):
                inputs[group[0]] = tensor
            outputs = code(*inputs)
            self._thread.ran = code, given, inputs, outputs
            return outputs

        return run

    def __call__(self, memory: _Memory, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The output; and code, inputs, the same with some joined, and outputs, unless ``forward``
        changes the layer itself."""
        thread = self._thread
        thread.memory = memory
        before = _state(memory.layer) if self._keeps_state is None else None
        output = self._forward(memory.layer, *args, **kwargs)
        if self._keeps_state is None:
            self._keeps_state = _state(memory.layer) == before
        ran = thread.ran if self._keeps_state else None
        thread.memory = thread.ran = None
        return output, ran


def _guards_of_arguments(guards: Iterable[Any]) -> list[bool]:
    """Only these: :func:`_signature` has all that is known of the layer and its class."""
    return [not re.search(r"\bself\b|\bG\[", guard.name) for guard in guards]


def _decompose_attention(graph: fx.Graph) -> None:
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
            scores = (q * k).sum(-1) * (given.get("scale") or query.shape[-1] ** -0.5)
            if mask is not None:
                row = proxy(mask).squeeze(-2)
                is_bool = mask.meta["example_value"].dtype == torch.bool
                scores = torch.where(row, scores, -math.inf) if is_bool else scores + row
            weights = torch.softmax(scores, -1).unsqueeze(-1)
            result = (weights * v).sum(-2, keepdim=True).to(query.dtype)
        node.replace_all_uses_with(result.node)
        graph.erase_node(node)


def _join_products(graph: fx.Graph, inputs: list[Any]) -> list[list[int]]:
    """Make one product of those that share their input, such as queries, keys and values. Of each
    group of inputs that are joined, by place, the first one is to receive them all."""
    product = torch.ops.pipekernels.linear
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    # By input, and by whether they have scales and biases.
    alike: dict[Any, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=product):
        x, *operands = node.args
        alike.setdefault((x, *(each is None for each in operands)), []).append(node)
    groups = []
    for nodes in alike.values():
        # Weights, scales and biases: each column can be joined if nothing else uses them.
        columns = [each for each in zip(*(node.args[1:] for node in nodes), strict=True) if each[0]]
        are_own = all(each in places and len(each.users) == 1 for each in chain(*columns))
        if len(nodes) == 1 or not are_own:
            continue
        sizes = [inputs[places[weight]].shape[0] for weight in columns[0]]
        for column in columns:
            group = [places[each] for each in column]
            inputs[group[0]] = torch.cat([inputs[place] for place in group])
            groups.append(group)
        with graph.inserting_before(nodes[0]):
            y = graph.call_function(product, nodes[0].args)
            for node, size, end in zip(nodes, sizes, accumulate(sizes), strict=True):
                part = graph.call_function(torch.narrow, (y, -1, end - size, size))
                node.replace_all_uses_with(graph.call_method("contiguous", (part,)))
        for node in nodes:
            graph.erase_node(node)
    return groups


class _Memory:
    """Holds a layer's tensors in huge pages, where the system has them, and those of a group one
    after another. Products then read their weights up to 1.2 times as fast."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._bytes: bytearray | mmap.mmap = bytearray()
        self._address = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Memory:
        return _Memory(copy.deepcopy(self.layer, memo))

    def join(self, groups: list[list[Tensor]]) -> list[Tensor]:
        """Each group as one tensor: a copy, if its tensors cannot be moved."""
        grouped = set(map(id, chain(*groups)))
        others = ([each] for each in _tensors_of(self.layer) if id(each) not in grouped)
        runs = [run for run in (*groups, *others) if all(map(_is_movable, run))]
        with torch.inference_mode(False):
            if not all(map(self._holds, runs)):
                self._move(runs)
            return [self._joined(run) if self._holds(run) else torch.cat(run) for run in groups]

    def _holds(self, run: list[Tensor]) -> bool:
        """Whether tensors are here, one after another."""
        starts = [each.data_ptr() - self._address for each in run]
        ends = [start + each.nbytes for start, each in zip(starts, run, strict=True)]
        return starts[1:] == ends[:-1] and 0 <= starts[0] < len(self._bytes)

    def _joined(self, run: list[Tensor]) -> Tensor:
        shape = sum(map(len, run)), *run[0].shape[1:]
        return self._tensor(run[0].data_ptr() - self._address, run[0].dtype, shape)

    def _tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=math.prod(shape), offset=offset)
        return flat.view(shape)

    def _move(self, runs: list[list[Tensor]]) -> None:
        sizes = [-(-sum(each.nbytes for each in run) // 64) * 64 for run in runs]
        self._bytes = pages = mmap.mmap(-1, sum(sizes) + _HUGE_PAGE, access=mmap.ACCESS_COPY)
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._address = self._tensor(0, torch.uint8, [1]).data_ptr()
        start = -self._address % _HUGE_PAGE
        for run, size in zip(runs, sizes, strict=True):
            offset = start
            for each in run:
                each.data = self._tensor(offset, each.dtype, each.shape).copy_(each.detach())
                offset += each.nbytes
            start += size


def _is_movable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()
    return is_plain and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()


class _OwnCache:
    """The part of a cache that one attention layer needs."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, keys: Tensor, values: Tensor, _: int, *args: Any, **kwargs: Any) -> Any:
        return self.layer.update(keys, values, *args, **kwargs)


class _Step:
    """The ``forward`` of a decoder layer: its compiled program where that applies."""

    def __init__(self, layer: nn.Module, programs: _Programs) -> None:
        from transformers import Cache

        self._memory = _Memory(layer)
        self._eager = layer.forward
        self._index: Any = _index(layer)
        self._programs = programs
        self._cache_type = Cache
        self._cache: Callable[[], Any] = lambda: None
        self._replay: _Replay | None = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        values = *args, *kwargs.values()
        cache = next((each for each in values if isinstance(each, self._cache_type)), None)
        if (
            cache is None
            or x.shape[1] > 1
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
        ):
            return self._eager(x, *args, **kwargs)
        # A new cache, of another prompt: look for the program anew, as the layer may have changed.
        if cache is not self._cache():
            if not cache.is_compileable:
                return self._eager(x, *args, **kwargs)
            self._cache = weakref.ref(cache, self._forget)
            self._replay = None
            signature = _signature(self._memory.layer)
            if signature not in self._programs:
                self._programs[signature] = _Program(self._memory.layer)
            self._program = self._programs[signature]
        # The values of this call and of the layer's cache, from which a replay takes its inputs.
        layer = cache.layers[self._index]
        rest = (each for each in values if each is not cache)
        given = _leaves((x, *rest, tuple(kwargs), *vars(layer).values()))
        likeness = list(map(_likeness, given))
        if self._replay is not None and self._replay.likeness == likeness:
            return self._replay(given)
        own = _OwnCache(layer)
        args = tuple(own if each is cache else each for each in args)
        kwargs = {name: own if each is cache else each for name, each in kwargs.items()}
        output, ran = self._program(self._memory, x, *args, **kwargs)
        self._replay = ran and _replay(ran, self._memory.layer, given, likeness, output)
        return output

    def _forget(self, _: Any) -> None:
        self._replay = None


def _leaves(values: Iterable[Any]) -> list[Any]:
    leaves: list[Any] = []
    for value in values:
        leaves += value if isinstance(value, tuple) else [value]
    return leaves


def _likeness(value: Any) -> Any:
    """Equal for two values that a program treats alike."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    constants = bool, int, float, str, torch.dtype, torch.device
    return value if value is None or isinstance(value, constants) else object()


class _Replay(NamedTuple):
    """What a program ran for a layer, called again without the compiler's dispatch, which takes as
    long as all of the layer's small operations."""

    code: Callable[..., Any]
    inputs: list[Any]
    places: list[tuple[int, int]]
    """Of inputs, each with that of the value of a call that it takes."""
    likeness: list[Any]
    """Of the values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __call__(self, given: list[Any]) -> Any:
        inputs = self.inputs.copy()
        for place, i in self.places:
            inputs[place] = given[i]
        return self.code(*inputs)[0]


def _replay(
    ran: Any, layer: nn.Module, given: list[Any], likeness: list[Any], output: Any
) -> _Replay | None:
    """None unless each input is a tensor of the layer, or one value of the call."""
    code, traced, inputs, outputs = ran
    own = set(map(id, _tensors_of(layer)))
    places = []
    for place, tensor in enumerate(traced):
        found = [i for i, value in enumerate(given) if value is tensor]
        if len(found) == 1:
            places.append((place, found[0]))
            inputs[place] = None
        elif found or id(tensor) not in own:
            return None
    is_whole = len(outputs) == 1 and output is outputs[0]
    return _Replay(code, inputs, places, likeness) if is_whole else None
