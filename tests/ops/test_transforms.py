"""Forward-mode derivatives and ``torch.func`` over operations and pipes are errors, never wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from pipekernels import ColumnParallelLinear, Communicator, Pipe, RowParallelLinear, ops
from pipekernels.ops import concat_micro_batches, split_micro_batches

Function = Callable[[Tensor], Tensor]


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_micro_batches(x: Tensor) -> Tensor:
    """With microbatches that also hold tensors that are not differentiated."""
    rows = split_micro_batches([x, torch.arange(len(x)), torch.ones(len(x), 2)], 3)
    whole, *_ = concat_micro_batches([(part.sin(), index, ones) for part, index, ones in rows])
    return whole.cos()


def dual(function: Function, *, needs_grad: bool = False) -> Tensor:
    with forward_ad.dual_level():
        primal = tensor(5, 2).requires_grad_(needs_grad)
        result = function(forward_ad.make_dual(primal, tensor(2, 5).t()))
        assert result.requires_grad == needs_grad
        return forward_ad.unpack_dual(result).tangent


TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "dual": dual,
    "dual that requires grad": lambda f: dual(f, needs_grad=True),
    "jvp": lambda f: jvp(f, (tensor(5, 2),), (tensor(5, 2).exp(),))[1],
    "grad": lambda f: grad(lambda x: f(x).sum())(tensor(5, 2)),
    "vmap": lambda f: vmap(f)(tensor(3, 5, 2)),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(tensor(3, 5, 2)),
    "jvp of vmap": lambda f: jvp(vmap(f), (tensor(3, 5, 2),), (tensor(3, 5, 2).exp(),))[1],
}
# What torch says of a custom backward, and of an operation without a batching rule.
REFUSED = "implement the jvp function|Function with functorch|Batching rule not implemented"


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "row": RowParallelLinear,
    "row_split_input": partial(RowParallelLinear, input_is_parallel=False),
    "column": ColumnParallelLinear,
    "column_gather_output": partial(ColumnParallelLinear, gather_output=True),
}
FUNCTIONS: dict[str, Any] = {
    "micro batches": lambda comm: by_micro_batches,
    "split": lambda comm: lambda x: split_micro_batches(x, 1)[0],
    **{
        kind: lambda comm, make=make: make(2, 3, comm=comm).double()
        for kind, make in LAYERS.items()
    },
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_splits_and_sharded_layers_refuse_to_be_transformed(kind: str, name: str) -> None:
    with Communicator.threads(1)[0] as comm, pytest.raises(RuntimeError, match=REFUSED):
        TRANSFORMS[name](FUNCTIONS[kind](comm))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls the operation for each element.
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_collectives_refuse_all_transforms_but_vmap(operation: str, name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return getattr(ops, operation)(x, comm)

    tangents = name == "jvp" or name.startswith("dual")
    message = f"^{operation} has a backward, but no forward-mode" if tangents else REFUSED
    with Communicator.threads(1)[0] as comm:
        if name == "vmap":
            assert torch.equal(vmap(function)(tensor(3, 5, 2)), tensor(3, 5, 2))
            return
        with pytest.raises(RuntimeError, match=message):
            TRANSFORMS[name](function)


def test_copies_to_other_devices_refuse_tangents() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(tensor(3), tensor(3))
        assert ops.p2p_copy(x, "cpu") is x
        with pytest.raises(RuntimeError, match=REFUSED):
            ops.p2p_copy([tensor(3), x], "meta")


@pytest.mark.parametrize("frozen", [False, True])
def test_pipes_refuse_tangents(frozen: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double().requires_grad_(not frozen)
    pipe = Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2)
    x = tensor(4, 2)
    with forward_ad.dual_level(), torch.set_grad_enabled(not frozen):
        duals = {
            name: forward_ad.make_dual(parameter, torch.ones_like(parameter))
            for name, parameter in pipe.named_parameters()
        }
        for call in (
            lambda: pipe(forward_ad.make_dual(x, x)),
            lambda: functional_call(pipe, duals, (x,)),
            lambda: pipe.train_step(forward_ad.make_dual(x, x), None, torch.Tensor.sum),
        ):
            with pytest.raises(RuntimeError, match="^a Pipe has a backward, but no forward-mode"):
                call()
        assert pipe(x).shape == (4, 2)


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not name.startswith("dual")])
def test_pipes_do_not_run_inside_transforms(name: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2).double()), [1], devices=["cpu"], chunks=2)
    refused = f"{REFUSED}|a Pipe has a backward, but no forward-mode|vmap"
    with pytest.raises(RuntimeError, match=refused):
        TRANSFORMS[name](pipe)
