"""Forward-mode derivatives and ``torch.func`` over operations and pipes: correct, or an error."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from pipekernels import ColumnParallelLinear, Communicator, Pipe, RowParallelLinear, ops
from pipekernels.ops import concat_micro_batches, split_micro_batches

Function = Callable[[Tensor], Tensor]


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_micro_batches(x: Tensor) -> Tensor:
    """``in_one`` by micro-batches, which also hold tensors that are not differentiated."""
    rows = split_micro_batches([x, torch.arange(len(x)), torch.ones(len(x), 2)], 3)
    whole, *_ = concat_micro_batches([(part.sin(), index, ones) for part, index, ones in rows])
    return whole.cos()


def in_one(x: Tensor) -> Tensor:
    return x.sin().cos()


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
    "vjp": lambda f: vjp(f, tensor(5, 2))[1](tensor(5, 2).exp())[0],
    "jacrev": lambda f: jacrev(f)(tensor(5, 2)),
    "jacfwd": lambda f: jacfwd(f)(tensor(5, 2)),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(tensor(5, 2)),
    "vmap": lambda f: vmap(f)(tensor(3, 5, 2)),
    "vmap over the last dimension": lambda f: vmap(f, in_dims=2)(tensor(5, 2, 3)),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(tensor(3, 5, 2)),
    "jvp of vmap": lambda f: jvp(vmap(f), (tensor(3, 5, 2),), (tensor(3, 5, 2).exp(),))[1],
    "grad of grad": lambda f: grad(lambda x: grad(lambda y: f(y).sum())(x).square().sum())(
        tensor(5, 2)
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has no batching rule for some dual op.
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_through_micro_batches_equal_those_of_the_whole(name: str) -> None:
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(by_micro_batches), transform(in_one), rtol=0, atol=1e-12)


def test_vmap_over_one_of_two_tensors() -> None:
    x, y = tensor(3, 4, 2), tensor(5, 2)
    parts = vmap(lambda a, b: split_micro_batches([a, b], 2, -1), in_dims=(0, None))(x, y)
    for (a, b), c, d in zip(parts, x.split(1, -1), y.split(1, -1), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d.expand(3, 5, 1))
    joined = vmap(lambda a, b: concat_micro_batches([a, b]), in_dims=(0, None))(x, y)
    assert torch.equal(joined, torch.cat([x, y.expand(3, 5, 2)], 1))


def test_tangents_are_cast_with_their_tensors() -> None:
    x, t = tensor(4, 2), tensor(2, 4).t()
    with forward_ad.dual_level():
        parts = split_micro_batches(forward_ad.make_dual(x, t), 2, dtype=torch.float32)
        whole = concat_micro_batches([parts[0], torch.ones(2, 2)], dtype=torch.float64)
        result = forward_ad.unpack_dual(whole)
    assert torch.equal(result.primal[:2], x[:2].float().double())
    assert torch.equal(result.tangent, torch.cat([t[:2].float().double(), torch.zeros(2, 2)]))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not name.startswith("vmap over")])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_collectives_refuse_all_transforms_but_vmap(operation: str, name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return getattr(ops, operation)(x, comm)

    with Communicator.threads(1)[0] as comm:
        if name == "vmap":
            assert torch.equal(vmap(function)(tensor(3, 5, 2)), tensor(3, 5, 2))
            return
        with pytest.raises(RuntimeError, match=f"^{operation} has a backward, but no forward-mode"):
            TRANSFORMS[name](function)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "row": RowParallelLinear,
    "row_split_input": partial(RowParallelLinear, input_is_parallel=False),
    "column": ColumnParallelLinear,
    "column_gather_output": partial(ColumnParallelLinear, gather_output=True),
}


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not name.startswith("vmap over")])
@pytest.mark.parametrize("kind", LAYERS)
def test_sharded_layers_refuse_to_be_transformed(kind: str, name: str) -> None:
    what = "no forward-mode derivative" if "dual" in name else "not run inside .* torch.func"
    with Communicator.threads(1)[0] as comm:
        layer = LAYERS[kind](2, 3, comm=comm).double()
        with pytest.raises(RuntimeError, match=f"^a layer that is sharded over ranks .*{what}"):
            TRANSFORMS[name](layer)


def test_copies_to_other_devices_refuse_tangents() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(tensor(3), tensor(3))
        assert ops.p2p_copy(x, "cpu") is x
        with pytest.raises(RuntimeError, match="^p2p_copy has a backward, but no forward-mode"):
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
    with pytest.raises(RuntimeError, match="transform the bare module, pipe.to_sequential()"):
        TRANSFORMS[name](pipe)
