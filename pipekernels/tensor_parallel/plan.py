"""Swaps linear layers of a whole model for sharded ones, by their names."""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping
from fnmatch import fnmatchcase
from math import nan
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipekernels.comm import Communicator
from pipekernels.tensor_parallel.linear import (
    REMEDY,
    ColumnParallelLinear,
    RowParallelLinear,
    more_than_linear,
)

# What a plan may make of a layer: the class, and its arguments.
KINDS: dict[str, tuple[Any, dict[str, bool]]] = {
    "column": (ColumnParallelLinear, {}),
    "column_gather_output": (ColumnParallelLinear, {"gather_output": True}),
    "row": (RowParallelLinear, {}),
    "row_split_input": (RowParallelLinear, {"input_is_parallel": False}),
}

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallelize(model: Model, plan: Mapping[str, str], comm: Communicator) -> Model:
    """Replace the layers that ``plan`` names by this rank's parts of them, in place.

    A collective: all ranks call it, and compare what they are to cut up.

    A column-parallel layer is to feed a row-parallel one, as in ``{"*.q_proj": "column",
    "*.k_proj": "column", "*.v_proj": "column", "*.o_proj": "row"}``: then the result is the
    model's, with one all-reduce per pair in the forward and one in the backward. What lies between
    the two sees this rank's features alone. So a module that counts heads must be told the count of
    this rank (``attention.num_heads //= comm.world_size``, say), and the world size must divide it.
    Ranks take consecutive features: of a layer that several outputs are fused in (``qkv``,
    ``gate_up_proj``), a rank's part is no such fusion, unless its features are grouped by head. A
    parameter between the two, such as the norms of queries and keys in Qwen3, gets this rank's part
    of its gradient; have the parts summed with ``parameter.register_hook(lambda grad:
    comm.all_reduce(grad.clone()))``. Dropout between the two may differ from rank to rank;
    elsewhere all ranks must draw the same, so there ranks want the same seed and one process each.
    If the world size does not divide the features, ranks draw unlike numbers of random numbers
    between the two, and differ afterwards: no dropout there then.

    A layer that has no such partner, an output head say, can be ``'column_gather_output'``, which
    returns all features on every rank, or ``'row_split_input'``, which takes all: its neighbours
    are as before, for one more collective.

    In evaluation mode PyTorch's ``nn.TransformerEncoderLayer`` hands the weights of its layers to
    one kernel; where some of them are replaced, it calls them in all modes.

    Gradients of all other parameters that are not sharded are whole on every rank. So what is taken
    from all gradients differs between ranks, which would then change those parameters differently.
    In place of ``torch.nn.utils.clip_grad_norm_`` use
    :func:`pipekernels.tensor_parallel.clip_grad_norm_`; in place of a ``GradScaler``
    ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``, with the group of the ranks;
    ``LBFGS`` does not work. Optimizers that look at a whole matrix (``Muon``, ``Adafactor``) see
    this rank's part of it. Make optimizers afterwards: the sharded layers have parameters of their
    own.

    DDP and FSDP around the model take the group of the ranks that hold the same parts: over all
    ranks, DDP would write those of rank 0 over the others'.

    Args:
        model: the full model, the same on every rank (seed all alike, or load a checkpoint first:
            weights are not sent); any ``nn.Module``, of Hugging Face or others.
        plan: patterns for the names that ``model.named_modules()`` gives, as in :mod:`fnmatch`
            (``*`` matches dots too), each with ``'column'``, ``'row'``, ``'column_gather_output'``
            (a :class:`ColumnParallelLinear` with ``gather_output=True``) or ``'row_split_input'``
            (a :class:`RowParallelLinear` with ``input_is_parallel=False``). Names that none matches
            stay as they are.
        comm: the communicator.

    Returns:
        ``model``. Its ``state_dict()`` holds this rank's parts;
        :func:`pipekernels.tensor_parallel.full_state_dict` gives that of the full model back, which
        ``load_state_dict`` takes on any world size, and
        :func:`pipekernels.tensor_parallel.full_optimizer_state_dict` that of its optimizer. Give
        ``torch.distributed.checkpoint`` the full ones: parts have the same key on all ranks, so it
            takes
        them for copies and keeps one.

    Raises:
        TypeError: a pattern matches a module that is no plain ``nn.Linear``, or one with more than
            its weight and bias: a parametrization, an adapter, hooks (register them afterwards); or
            ``comm`` is no communicator.
        ValueError: a pattern matches nothing or the model itself, or patterns that match one layer
            disagree; a kind that does not exist; a layer with fewer features than there are ranks;
            one whose weight belongs to another module too; ranks whose layers, or the first numbers
            of their weights, differ. The model is unchanged then.
    """
    for pattern, kind in plan.items():
        if kind not in tuple(KINDS):  # It may be unhashable.
            known = ", ".join(map(repr, KINDS))
            raise ValueError(f"plan[{pattern!r}] must be one of {known}, got {kind!r}")
    kinds = _match(model, plan)
    _check_sharing(model, kinds)
    sharded = {layer: _shard(layer, *kind, comm) for layer, kind in kinds.items()}
    if sharded:
        _check_agreement(kinds, comm)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and child in sharded:
                parent._modules[name] = sharded[child]
    _call_the_layers(model, set(sharded.values()))
    return model


def _shard(layer: nn.Linear, name: str, kind: str, comm: Communicator) -> nn.Module:
    sharded, arguments = KINDS[kind]
    try:
        result: nn.Module = sharded.from_linear(layer, comm, **arguments)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be made {kind!r}: {error}") from error
    return result


def _check_agreement(kinds: Mapping[nn.Linear, tuple[str, str]], comm: Communicator) -> None:
    """Whether all ranks cut up the same layers: parts of others would be summed, or wait for
    ever."""
    sizes = [(layer.in_features, layer.out_features, layer.bias is None) for layer in kinds]
    digest = zlib.crc32(repr((list(kinds.values()), sizes)).encode())
    digests = comm.all_gather(torch.tensor([digest], device="cpu")).tolist()
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ValueError(
            f"ranks {others} are to shard other layers than rank 0: names, kinds or sizes differ; "
            "give all ranks the same model and plan"
        )
    firsts = [[_first(layer.weight) for layer in kinds]]
    ranks = comm.all_gather(
        torch.tensor(firsts, dtype=torch.float64, device="cpu")
    )  # [rank, layer]
    differences = (ranks - ranks[0]).nan_to_num(0).nonzero().tolist()
    if differences:
        rank, layer = differences[0]
        name, _ = list(kinds.values())[layer]
        raise ValueError(
            f"the weight of {name!r} on rank {rank} is not that on rank 0; seed all ranks alike "
            "before the model is made, or load the same checkpoint on all"
        )


def _first(weight: Tensor) -> float:
    """The first number; NaN if there is none."""
    if weight.is_meta or weight.numel() == 0:
        return nan
    return weight.detach().flatten()[0].item().real


def _match(model: nn.Module, plan: Mapping[str, str]) -> dict[nn.Linear, tuple[str, str]]:
    """The layers to replace, each with its name and what it becomes."""
    kinds: dict[nn.Linear, tuple[str, str]] = {}
    unused = set(plan)
    for name, module in model.named_modules(remove_duplicate=False):
        for pattern, kind in plan.items():
            if not fnmatchcase(name, pattern):
                continue
            unused.discard(pattern)
            if module is model:
                raise ValueError(
                    f"{pattern!r} matches the model itself, which cannot be replaced in place; use "
                    "a narrower pattern, or RowParallelLinear.from_linear(layer, comm)"
                )
            if type(module) is not nn.Linear:
                raise TypeError(
                    f"{pattern!r} matches {name!r}, a {type(module).__name__}, but only nn.Linear "
                    "can be sharded; use a narrower pattern"
                )
            more = more_than_linear(module)
            if more is not None:
                raise TypeError(
                    f"{pattern!r} matches {name!r}, which has {more}; a shard would lose that, so "
                    f"{REMEDY}"
                )
            known = kinds.setdefault(module, (name, kind))[1]
            if known != kind:
                raise ValueError(f"the plan makes {name!r} both {known!r} and {kind!r}")
    if unused:
        raise ValueError(
            f"no module's name matches {', '.join(map(repr, sorted(unused)))}; see the names in "
            "model.named_modules()"
        )
    return kinds


def _call_the_layers(model: nn.Module, sharded: set[nn.Module]) -> None:
    """Keeps PyTorch's encoders from giving the weights of ``sharded`` layers to a kernel that takes
    them for whole ones."""
    for module in model.modules():
        if sharded.isdisjoint(module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # Neither of the two that the kernel knows.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # Only that kernel takes nested ones.


def _check_sharing(model: nn.Module, sharded: Container[nn.Module]) -> None:
    """A weight that another module uses as well, as tied embeddings do, cannot be cut up for
    one."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((name, module))
    for using in owners.values():
        names = [name for name, _ in using]
        if len(using) > 1 and any(module in sharded for _, module in using):
            raise ValueError(
                f"{' and '.join(map(repr, names))} share a parameter; untie them first"
            )
