"""Replaces linear layers of a whole model by sharded ones, selected by name, and back;
compares the two on one input."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from math import nan
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from pipekernels._torch_private import tree_leaves
from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.full_layer import (
    REMEDY,
    is_hooked,
    set_attribute,
    undo_changes,
)
from pipekernels.tensor_parallel.invariant.exact_sums import check_own_parameters
from pipekernels.tensor_parallel.invariant.slabs import has_slabs
from pipekernels.tensor_parallel.plan.kinds import SUMMED, HookKind, LayerKind
from pipekernels.tensor_parallel.plan.sharding_plan import base_of, providers, resolve
from pipekernels.tensor_parallel.sharded import ShardedLayer, sharded_layers

Model = TypeVar("Model", bound=nn.Module)


def tensor_unparallelize(model: Model) -> Model:
    """Replace all sharded layers, in place, by full ones with the values of all shards, and undo
    what :func:`tensor_parallelize` has changed in other modules.

    A collective: all ranks call it, and all get the full model. Make optimizers afterwards: the
    layers have new parameters. :func:`full_optimizer_state_dict`, called before, keeps the state.

    Args:
        model: the model.

    Returns:
        ``model``.

    Raises:
        TypeError: a sharded layer has hooks, a parametrization or a mask, which would be lost; or
            the model itself is a sharded layer. The model is then unchanged.
    """
    if isinstance(model, ShardedLayer):
        raise TypeError(
            "the model itself is a sharded layer, which cannot be replaced in place; use "
            "layer.to_full()"
        )
    sharded = sharded_layers(model)
    for layer in sharded:
        if is_hooked(layer):
            raise TypeError(
                f"the sharded layer {layer.name!r} has hooks, which would be lost; {REMEDY}"
            )
    # Full layers share parameters as their shards do, but have no scales of int8.
    full = {layer: layer.to_full() for layer in sharded}
    first: dict[nn.Parameter, nn.Parameter] = {}
    for layer, module in full.items():
        for name, parameter in layer.named_parameters(recurse=False):
            if name in module._parameters:
                shared = first.setdefault(parameter, module.get_parameter(name))
                module.register_parameter(name, shared)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, ShardedLayer):
                parent._modules[name] = full[child]
        undo_changes(parent)
    return model


Outputs = dict[str, list[Tensor]]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference by dtype, relative to the largest magnitude. Sums in another order differ by
less; another part of a sum, or heads that are mixed up, by about 1."""


def outputs_of(model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> Outputs:
    """The outputs of the modules of ``model`` in one forward in evaluation mode, by name, in the
    order in which modules return."""
    found: Outputs = {}

    def note(name: str, output: Any) -> None:
        leaves = [leaf.clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        found[name] = [leaf for leaf in leaves if leaf.is_floating_point()]

    # Clones: a later module may change them in place.
    handles = [
        module.register_forward_hook(lambda _, args, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            if isinstance(inputs, Tensor):
                model(inputs)
            else:
                model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return found


def first_difference(whole: Outputs, sharded: Outputs) -> tuple[str, float] | None:
    """The first module whose outputs differ, and by how much, relative to the largest magnitude.
    Outputs inside sharded parts have other shapes and are skipped."""
    for name, outputs in sharded.items():
        for a, b in zip(whole.get(name, ()), outputs, strict=False):
            if a.shape != b.shape or a.numel() == 0:
                continue
            error = ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()
            if not error <= _TOLERANCE.get(a.dtype, 1e-1):
                return name or "the model itself", error
    return None


def tensor_parallelize(
    model: Model,
    plan: Mapping[str, str] | Literal["auto"] = "auto",
    comm: Communicator | None = None,
    *,
    invariant: bool = False,
    check: Tensor | Mapping[str, Any] | None = None,
) -> Model:
    """Replace the layers that ``plan`` names by this rank's shards of them, in place.

    A collective: all ranks call it, and check that they shard the same layers. Let each
    column-parallel layer feed a row-parallel one: the model's result is then unchanged, at one
    all-reduce per pair in the forward and one in the backward. :doc:`/guides/tensor_parallel` lists
    kinds, rules for modules between the two, and what optimizers, DDP and FSDP need.

    Args:
        model: the full model, perhaps with LoRA adapters of peft (plans then use the names of the
            model inside), the same on every rank: weights are not sent, so use the same seed or
            load the same checkpoint first.
        plan: patterns for the names in ``model.named_modules()``, as in ``fnmatch`` (``*``
            matches dots too), each with a kind. Modules that no pattern matches stay whole.
            ``"auto"``: the plan that the model carries, or one that is derived from a small copy
            of it (:doc:`/guides/transformers`); it divides head counts as well.
            :func:`plan_for` shows it.
        comm: ``None`` for a new one, of :meth:`pipekernels.Communicator.from_process_group`.
        invariant: results and gradients have the same bits on 1, 2, 4 and 8 ranks
            (:mod:`pipekernels.tensor_parallel.invariant`). ``"auto"`` leaves an embedding and a
            head whole whose vocabulary is not a multiple of 64.
        check: an input, or keyword arguments of the forward, the same on all ranks. The whole
            model's outputs for it are compared with the sharded model's, module by module.

    Returns:
        ``model``. Its ``state_dict()`` holds this rank's shards, with the same keys on all ranks;
        :func:`pipekernels.tensor_parallel.full_state_dict` returns the full state.

    Raises:
        TypeError: a pattern matches a module that is not of a kind's class, or one with a
            parametrization, an adapter or hooks (register them afterwards).
        ValueError: a pattern matches nothing or the model itself; patterns that match one layer
            disagree; a kind is unknown; a layer cannot be divided, or shares a parameter with a
            module that is not sharded the same way; ranks differ in layers or weights; ``"auto"``
            finds no plan; or outputs for ``check`` differ. The model is then unchanged.
    """
    if comm is None:
        comm = Communicator.from_process_group()
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm must be a pipekernels.Communicator, got {type(comm).__name__}")
    # Checked: shard, compare, and undo it if a rank finds a difference.
    if check is not None:
        before = outputs_of(model, check)
        tensor_parallelize(model, plan, comm, invariant=invariant)
        difference = first_difference(before, outputs_of(model, check))
        found = comm.all_gather(torch.tensor([difference is not None], device="cpu"))
        if found.any():
            tensor_unparallelize(model)
            name, error = difference or ("a module on another rank", float("nan"))
            raise ValueError(
                f"the sharded model differs from the whole one: {name!r} is the first module whose "
                f"output differs, by {error:.2g} of its largest magnitude; leave the modules "
                "around it whole"
            )
        return model
    # What may fail comes first: the model is unchanged then.
    base = base_of(model)
    sharding_plan = resolve(base, plan, comm.world_size)
    layers, hooked = sharding_plan.modules(base, LayerKind), sharding_plan.modules(base, HookKind)
    if plan == "auto" and invariant:  # Not every vocabulary has slabs.
        layers = {
            layer: (name, kind)
            for layer, (name, kind) in layers.items()
            if not kind.is_of_vocabulary or has_slabs(layer.get_parameter("weight").shape[0])
        }
    for module, (name, hook) in hooked.items():
        if hook == SUMMED and invariant:
            check_own_parameters(module, name)
    shards = {m: shard_of(m, name, kind, comm, invariant) for m, (name, kind) in layers.items()}
    weights: dict[Any, Any] = {}  # Shards by full weights, which layers may share.
    for layer, shard in shards.items():
        if layers[layer][1].can_tie:
            shard.weight = weights.setdefault(layer.weight, shard.weight)
    if shards:
        _check_ranks_agree(base, layers, hooked.values(), comm)
    # From here on the model changes.
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in shards:
                parent._modules[name] = shards[child]
    for module, (_, hook) in hooked.items():
        hook.add_hooks(module, comm, invariant)
    for name, attributes in sharding_plan.attributes.items():
        for attribute, by_rank in attributes.items():
            set_attribute(base.get_submodule(name), attribute, by_rank[comm.rank])
    _disable_fused_encoders(model)
    for provider in providers():
        provider.prepare(model)
    return model


def _disable_fused_encoders(model: nn.Module) -> None:
    """torch's fused encoder kernel would read shards as full weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and sharded_layers(module):
            # The fused kernel needs 1 (ReLU) or 2 (GELU).
            set_attribute(module, "activation_relu_or_gelu", 0)
        if isinstance(module, nn.TransformerEncoder) and sharded_layers(module):
            # Only the fused kernel takes nested tensors.
            set_attribute(module, "use_nested_tensor", False)


def shard_of(
    layer: nn.Module, name: str, kind: LayerKind, comm: Communicator, invariant: bool
) -> ShardedLayer:
    """This rank's shard of the layer that is called ``name``, made ``kind``. TypeError or
    ValueError if it cannot be."""
    try:
        shard: ShardedLayer = kind.shard(layer, comm, invariant=invariant)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name!r} cannot be made {kind.word!r}: {error}") from error
    for inner_name, inner in shard.named_modules(prefix=name):
        if isinstance(inner, ShardedLayer):
            inner.name = inner_name
    return shard


def _check_ranks_agree(
    model: nn.Module,
    layers: Mapping[nn.Module, tuple[str, LayerKind]],
    hooked: Iterable[tuple[str, HookKind]],
    comm: Communicator,
) -> None:
    """Raise unless all ranks shard the same layers: else they hang, or sum unrelated shards. Other
    layers may differ until weights are loaded, but not the whole factors of adapters."""
    words = [(name, kind.word) for name, kind in (*layers.values(), *hooked)]
    sizes = [[(key, tuple(p.shape)) for key, p in layer.named_parameters()] for layer in layers]
    digest = torch.tensor([zlib.crc32(repr((words, sizes)).encode())], device="cpu")
    digests = comm.all_gather(digest).tolist()
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise ValueError(
            f"ranks {others} shard other layers than rank 0: names, kinds or sizes differ; "
            "give all ranks the same model and plan"
        )
    firsts = ((name, next(layer.parameters())) for layer, (name, _) in layers.items())
    weights = dict(firsts) | {n: p for n, p in model.named_parameters() if ".lora_" in n}
    # The first element of each says whether they are the same.
    elements = [
        nan if w.is_meta or w.numel() == 0 else w.detach()[(0,) * w.dim()].item().real
        for w in weights.values()
    ]
    gathered = comm.all_gather(torch.tensor([elements], dtype=torch.float64, device="cpu"))
    differences = (gathered - gathered[0]).nan_to_num(0).nonzero().tolist()  # [[rank, index], ...]
    if differences:
        rank, index = differences[0]
        raise ValueError(
            f"the weight of {list(weights)[index]!r} on rank {rank} is not that on rank 0; seed "
            "all ranks the same way before the model is made, or load the same checkpoint on all"
        )
