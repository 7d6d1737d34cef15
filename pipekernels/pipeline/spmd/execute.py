r"""A pipeline whose stages are the ranks of one mesh dimension: every rank runs the same program.

GPipe's schedule (Huang et al., 2019) on ``torch.distributed``: a stage works on a microbatch while
the next one works on the microbatch before. To autograd the communication is a few nodes in each
rank's graph, threaded on a chain of empty tokens::

    start -- receive 0       send 0, receive 1       send 1, receive 2 -- ... -- end
                     \_module_/              \_module_/

In the backward each node sends the gradient of what it has received, then receives the gradient of
what it has sent. The chain makes the backward go through the forward's messages in reverse, and
through all of them or none, whatever the loss depends on. Between the nodes are ordinary graphs,
whose memory the backward frees microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind, integer
from pipekernels._torch_private import disable_dynamo, enclosing_mesh
from pipekernels.ops.dispatch import check_differentiated_once
from pipekernels.pipeline.batchnorm import committed
from pipekernels.pipeline.context import draw_seed, generators_of, preserved, seed_task
from pipekernels.pipeline.nested import tensors_in
from pipekernels.pipeline.spmd.transport import (
    Axis,
    Features,
    Link,
    Parcel,
    axis_of,
    closed,
    opened,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# torch.compile knows neither process groups nor the modes that seed.
@disable_dynamo
def execute_pipeline(
    module: nn.Module,
    x: Tensor | None,
    *args: Any,
    num_microbatches: int,
    model_axis_name: str,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> Any:
    """Run a batch through stages on the ranks of a mesh dimension. All of them call it, and run the
    backward of the same loss (:doc:`/guides/spmd`).

    Args:
        module: this rank's stage. What it returns, a tensor, or a tuple or dict of tensors, is the
            first argument of the next one.
        x: ``[batch, ...]``, on the mesh's device. Only the first stage needs it; the others may
            pass ``None``.
        num_microbatches: how many microbatches ``x`` is split into, along dimension 0.
        model_axis_name: the mesh dimension whose ranks hold the stages.
        mesh: a mesh with this dimension. Default: the enclosing one (``with mesh:``).
        args, kwargs: more arguments of the module, passed whole with every microbatch.

    Returns:
        The last stage's output, with the microbatches of each tensor joined along dimension 0;
        zeros of the same shape and dtype on all other stages.

    Raises:
        ValueError: ``num_microbatches`` does not divide the batch, is below 1, or differs from the
            previous stage's; the mesh lacks a dimension or this rank; or results of two
            microbatches differ in shape or dtype.
        TypeError: an argument or a result is of another type.

    A rank that raises leaves the others waiting until its process ends or the group's timeout.
    """
    check_kind("module", module, nn.Module, "an nn.Module")
    count = integer("num_microbatches", num_microbatches)
    axis = axis_of(mesh, model_axis_name)
    parts = _parts(x, count) if axis.stage == 0 or x is not None else ()
    generators = generators_of([axis.device])
    base = draw_seed()
    with committed([module]), preserved(generators):
        # A stage announces its messages to the next one when its first result shows their shape.
        previous = None if axis.stage == 0 else Link.to_previous(axis, count)
        following: Link | None = None
        token = _start(previous, axis, x, module, (args, kwargs))
        token, *received = _Exchange.apply(None, previous, token)  # Only receives.
        results: list[list[Tensor]] = []
        for m in range(count):
            # Cloned, as layers may work in place.
            part = (
                parts[m].clone() if previous is None else closed(received, previous.parcel.layout)
            )
            seed_task(generators, base, axis.stage, m)
            tensors, layout = opened(module(part, *args, **kwargs))
            if axis.is_last:
                # Modules may return the same memory each time.
                results.append([each.clone() for each in tensors])
            else:
                parcel = Parcel.of(count, tensors, layout)
                following = following or Link.to_next(axis, parcel)
                following.parcel.check(parcel)
            upcoming = None if m == count - 1 else previous
            sent = () if following is None else tensors
            token, *received = _Exchange.apply(following, upcoming, token, *sent)
        if following is not None:
            following.flush()
        # All ranks learn from the last one how the output looks, and whether there is a backward.
        joined = [torch.cat(each) for each in zip(*results, strict=True)]
        parcel = Parcel.of_last(axis, Parcel.of(1, joined, layout) if axis.is_last else None)
    outputs = joined or [each.empty(axis.device).zero_() for each in parcel.features]
    marked = [each.requires_grad for each in parcel.features]
    pairs = zip(outputs, marked, strict=True)
    outputs = [_End.apply(token, output) if is_marked else output for output, is_marked in pairs]
    return closed(outputs, parcel.layout)


@disable_dynamo
def execute_pipeline_step(
    module: nn.Module,
    state: Tensor,
    input: Tensor,
    *args: Any,
    model_axis_name: str,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """One iteration of a pipeline, for custom loops: each stage computes, then sends its result.

    Before the first microbatch reaches a stage, and after the last one leaves it, the module gets
    meaningless input. Random numbers come from the rank's own generators.

    Args:
        module: this rank's stage; its results have the shape and dtype of ``state``.
        state: what this rank's previous call returned, ``[microbatch, ...]``; zeros at first. The
            module's input on all stages but the first.
        input: a microbatch, the module's input on the first stage.
        args, kwargs, model_axis_name, mesh: as for :func:`execute_pipeline`.

    Returns:
        The new state, which is zeros on the first stage, and the output, which is the module's
        result on the last stage and zeros of its shape on the others.

    Raises:
        ValueError: the result's shape or dtype differs from ``state``'s, or as there.
        TypeError: as there.
    """
    check_kind("module", module, nn.Module, "an nn.Module")
    axis = axis_of(mesh, model_axis_name)
    differentiable = torch.is_grad_enabled() and state.is_floating_point()
    features = Features.of(state)._replace(requires_grad=differentiable)
    parcel = Parcel(1, "", [features])
    previous = None if axis.stage == 0 else Link(axis, axis.stage - 1, parcel)
    following = None if axis.is_last else Link(axis, axis.stage + 1, parcel)
    token = _start(previous, axis, input, module, (args, state, kwargs))
    result = module(input if previous is None else state, *args, **kwargs)
    check_kind("what the module returns", result, Tensor, "a tensor")
    parcel.check(Parcel.of(1, [result], ""))
    output = result.clone() if following is None else features.empty(axis.device).zero_()
    sent = () if following is None else (result,)
    token, *received = _Exchange.apply(following, previous, token, *sent)
    next_state = features.empty(axis.device).zero_() if previous is None else received[0]
    if following is not None:
        following.flush()
    if not differentiable:
        return next_state, output
    # The outputs of the first iterations are seldom used, but the next one uses this state.
    if previous is None:
        next_state = _End.apply(token, next_state)
    return next_state, _End.apply(token, output)


class PipelineModule(nn.Module):
    """A stage of a pipeline along a mesh dimension, as a module: see :func:`execute_pipeline`.

    Every rank makes its stage by calling ``module_fn``, with random numbers that depend on the
    stage and on one number drawn from the rank's default CPU generator. So parameters differ
    between stages, and agree between ranks of one stage that use one seed.

    Args:
        module_fn: makes the module that this rank runs, the attribute ``module``; a TypeError if it
            is none.
        model_axis_name, num_microbatches, mesh: as for :func:`execute_pipeline`, with the same
            errors.
    """

    def __init__(
        self,
        model_axis_name: str,
        num_microbatches: int,
        module_fn: Callable[[], nn.Module],
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.model_axis_name = model_axis_name
        self.num_microbatches = integer("num_microbatches", num_microbatches)
        self.module_fn = module_fn
        axis = axis_of(mesh, model_axis_name)
        self._execute = partial(
            execute_pipeline,
            num_microbatches=self.num_microbatches,
            model_axis_name=model_axis_name,
            mesh=enclosing_mesh() if mesh is None else mesh,
        )
        generators = generators_of([axis.device])
        with preserved(generators):
            seed_task(generators, draw_seed(), axis.stage, 0)
            self.module = module_fn()
        check_kind("what module_fn returns", self.module, nn.Module, "an nn.Module")

    def forward(self, x: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; arguments, result and errors as for :func:`execute_pipeline`."""
        return self._execute(self.module, x, *args, **kwargs)


def _parts(x: Any, count: int) -> Sequence[Tensor]:
    check_kind("x", x, Tensor, "a tensor on the first stage")
    if len(x) % count:
        raise ValueError(
            f"Batch size {len(x)} must be divisible by number of microbatches {count}; change one "
            "of them, or pad the batch"
        )
    return list(x.tensor_split(count))


def _start(previous: Link | None, axis: Axis, x: Any, module: nn.Module, arguments: Any) -> Tensor:
    # The output requires a gradient on all ranks or none, so the token always requires one.
    anchor = torch.empty(0, device=axis.device, requires_grad=True)
    token: Tensor = _Start.apply(previous, anchor, x, *module.parameters(), *tensors_in(arguments))
    return token


class _Start(torch.autograd.Function):
    """Connects the pipeline's inputs and parameters to its chain, so that a backward for any of
    them runs the whole chain."""

    @staticmethod
    def forward(ctx: Any, previous: Link | None, anchor: Tensor, x: Any, *others: Tensor) -> Tensor:
        ctx.previous = previous
        is_unused = previous is not None and x is not None
        ctx.nothing = x.new_zeros(()).expand_as(x) if is_unused else None
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.previous is not None:
            ctx.previous.flush()
        return None, None, ctx.nothing, *[None] * (len(ctx.needs_input_grad) - 3)


class _Exchange(torch.autograd.Function):
    """Passes on a result, if there is a stage after this one, and takes the next microbatch, if
    there is one from the stage before."""

    @staticmethod
    def forward(
        ctx: Any, following: Link | None, previous: Link | None, token: Tensor, *results: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.following, ctx.previous = following, previous
        ctx.set_materialize_grads(False)
        if following is not None:
            following.send(results, following.parcel.features)
        if previous is None:
            return (token.new_empty(0),)
        features = previous.parcel.features
        parts = previous.receive(features)
        pairs = zip(parts, features, strict=True)
        ctx.mark_non_differentiable(*[part for part, each in pairs if not each.requires_grad])
        return token.new_empty(0), *parts

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        following, previous = ctx.following, ctx.previous
        if previous is not None:
            pairs = zip(grads, previous.parcel.features, strict=True)
            sent = [grad for grad, each in pairs if each.requires_grad]
            previous.send(sent, previous.differentiable)
        if following is None:
            return None, None, None
        received = iter(following.receive(following.differentiable))
        features = following.parcel.features
        return None, None, None, *[next(received) if x.requires_grad else None for x in features]


class _End(torch.autograd.Function):
    """Lets a new tensor depend on the chain."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.mark_dirty(tensor)  # It is returned itself, not as a view.
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        # First on every rank, so that these raise before any rank waits for another.
        check_differentiated_once("a pipeline")
        _ = ctx.saved_tensors  # Raises in a second backward without retain_graph.
        return None, grad
