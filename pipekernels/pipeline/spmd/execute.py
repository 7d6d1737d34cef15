r"""A pipeline whose stages are the ranks of one mesh dimension: every rank runs the same program.

GPipe's schedule (Huang et al., 2019) on ``torch.distributed``: stage i works on micro-batch m in
iteration i + m, so ``num_microbatches + stages - 1`` iterations pass them all through. To autograd
the communication is a few nodes in each rank's graph, threaded on a chain of empty tokens::

    start -- take 0       put 0 -- take 1       put 1 -- ... -- output
                  \_module_/            \_module_/

Take receives a micro-batch from the previous stage, put sends the module's result to the next; in
the backward put receives the gradient and take sends it. The chain makes the backward run the
forward's iterations in reverse, and all of them or none, whatever the loss depends on. Between take
and put is an ordinary graph, whose memory the backward frees step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind, integer
from pipekernels._torch_private import disable_dynamo
from pipekernels.comm import messages
from pipekernels.local_ops.transforms import check_differentiated_once
from pipekernels.pipeline.spmd.axis import Axis
from pipekernels.pipeline.spmd.transport import Features, Passage
from pipekernels.pipeline.stage.batchnorm import committed
from pipekernels.pipeline.stage.random_state import MiniBatchSeeds, preserved
from pipekernels.pipeline.values.structure import tensors_in

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
    replicated_axis_names: Collection[str] = (),
    **kwargs: Any,
) -> Tensor:
    """Run a batch through stages on the ranks of a mesh dimension; all of these ranks must call it.

    The rank of index i along the dimension runs stage i. A stage may change the shape and dtype of
    its input, in the same way for all micro-batches. Communication stays within the dimension's
    process group, so data and tensor parallelism may use the other dimensions.

    The result is differentiable, once, with respect to ``x``, the module's parameters, and tensors
    in ``args`` and ``kwargs``. Every rank of the dimension must run the backward: all compute the
    same loss of the output, which has no effect on gradients except on the last stage. ``x`` gets
    its gradient on the first stage and zeros on the others. The activations of all micro-batches
    are kept for the backward; ``torch.utils.checkpoint`` inside the module works unchanged.

    Every micro-batch has its own random numbers: they depend on this rank, the micro-batch's
    index, and one number that each call draws from the rank's default CPU generator.

    Args:
        module: this rank's stage; takes a tensor and returns one.
        x: ``[batch, ...]``, on the mesh's device. Only the first stage needs it; the others may
            pass ``None``.
        args: more arguments of the module, passed whole with every micro-batch.
        num_microbatches: how many micro-batches ``x`` is split into, along dimension 0.
        model_axis_name: the mesh dimension whose ranks hold the stages.
        mesh: a mesh with this dimension. Default: the enclosing one (``with mesh:``).
        replicated_axis_names: mesh dimensions whose ranks work on the same activations, as in
            tensor parallelism. Ranks that differ in these alone, and use one seed, draw the
            same random numbers.
        kwargs: more keyword arguments of the module, passed whole with every micro-batch.

    Returns:
        What the last stage returned, ``[rows, ...]``, micro-batches joined along dimension 0; zeros
        of the same shape and dtype on all other stages.

    Raises:
        ValueError: ``num_microbatches`` does not divide the batch, is not an integer of at least 1,
            or differs between stages; there is no mesh, or it lacks a dimension or this rank; or
            results of two micro-batches differ in shape or dtype.
        TypeError: ``module`` is not an ``nn.Module``, ``mesh`` not a ``DeviceMesh``, or ``x`` or a
            result not a tensor.
        RuntimeError: another stage raised an exception in its forward.

    ``torch.compile`` leaves a pipeline as it is, also in a compiled program: compile the stage.

    After an exception in a forward, which all ranks raise, the mesh is usable. A rank that raises
    in its backward leaves the others waiting until its process ends or the group's timeout is over.
    """
    check_kind("module", module, nn.Module, "an nn.Module")
    count = integer("num_microbatches", num_microbatches)
    axis = Axis.of(mesh, model_axis_name, replicated_axis_names)
    return _execute(module, x, args, kwargs, count, axis)


@disable_dynamo
def _execute(
    module: nn.Module,
    x: Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    axis: Axis,
) -> Tensor:
    passage = Passage(axis, count, x if axis.is_first else None)
    random = MiniBatchSeeds([axis.device])

    def stage(m: int, part: Tensor) -> Any:
        with random.inline(m, axis.random_key):
            return module(part, *args, **kwargs)

    # Commits only after _agree(): until then another rank may have failed.
    with committed([module]):
        token = _start(passage, axis, x, module, (args, kwargs))
        failure: Exception | None = None
        try:
            arriving = passage.begin()
            _check_batch(x, count, needed=axis.is_first)
        except (TypeError, ValueError) as error:
            arriving, failure = False, error
        if arriving:
            with preserved([axis.device]):
                token, failure = _pass_all(stage, count, passage, token)
        if failure is not None or not arriving:
            passage.abandon()
        passage.flush()
        try:
            features = _agree(axis, failure, passage.features)
        finally:
            del failure  # Its traceback holds this frame.
    rows, *rest = features.shape
    features = features._replace(shape=(count * rows, *rest))
    if not features.requires_grad:
        return passage.output(features)
    output: Tensor = _Output.apply(passage, features, token)
    return output


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
    """One iteration of a pipeline, for custom loops: each stage works, then passes on.

    All ranks of the mesh dimension call it in every iteration, each with the ``state`` that its
    previous call returned; :func:`execute_pipeline` says how they are differentiated together.
    Until the first micro-batch has reached a stage, and after the last one has left it, the module
    works on whatever it is given. Random numbers are those of the rank's own generators.

    Args:
        module: this rank's stage; its results have the shape and dtype of ``state``.
        state: what the previous stage passed on in the iteration before, ``[micro-batch, ...]``;
            zeros at first. The module's input on all stages but the first.
        input: a micro-batch, the module's input on the first stage.
        args: more arguments of the module.
        model_axis_name: the mesh dimension whose ranks hold the stages.
        mesh: a mesh with this dimension. Default: the enclosing one (``with mesh:``).
        kwargs: more keyword arguments of the module.

    Returns:
        The new state, which is zeros on the first stage, and the output, which is the module's
        result on the last stage and zeros of its shape on the others.

    Raises:
        ValueError: the result's shape or dtype is not that of ``state``; or there is no mesh, or it
            lacks the dimension or this rank.
        TypeError: ``module`` is not an ``nn.Module``, ``mesh`` not a ``DeviceMesh``, or the result
            not a tensor.

    An exception on one rank leaves the others waiting, until its process ends or the group's
    timeout is over.
    """
    check_kind("module", module, nn.Module, "an nn.Module")
    axis = Axis.of(mesh, model_axis_name)
    differentiable = torch.is_grad_enabled() and state.is_floating_point()
    features = Features(tuple(state.shape), state.dtype, differentiable)
    passage = Passage(axis, 1, features=features)
    token = _start(passage, axis, input, module, (args, state, kwargs))
    result = module(input if axis.is_first else state, *args, **kwargs)
    passage.check(0, result)
    token = _Put.apply(passage, 0, token, result)
    state, token = _Take.apply(passage, 0, token)
    passage.flush()
    return state, _Output.apply(passage, features, token)


class PipelineModule(nn.Module):
    """A stage of a pipeline along a mesh dimension, as a module: see :func:`execute_pipeline`.

    Every rank makes its stage by calling ``module_fn``, with random numbers that depend on the
    stage and on one number drawn from the rank's default CPU generator. So parameters differ
    between stages, and agree between ranks of one stage that use one seed.

    Args:
        model_axis_name: the mesh dimension whose ranks hold the stages.
        num_microbatches: how many micro-batches an input is split into.
        module_fn: makes the module that this rank runs.
        mesh: a mesh with this dimension. Default: the enclosing one (``with mesh:``).
        replicated_axis_names: as for :func:`execute_pipeline`.

    Attributes:
        model_axis_name, num_microbatches, module_fn, replicated_axis_names: the arguments.
        module: what ``module_fn`` returned.

    Raises:
        ValueError: ``num_microbatches`` is not an integer of at least 1; or there is no mesh, or it
            lacks a dimension or this rank.
        TypeError: ``module_fn`` did not return an ``nn.Module``; ``mesh`` is not a ``DeviceMesh``.
    """

    def __init__(
        self,
        model_axis_name: str,
        num_microbatches: int,
        module_fn: Callable[[], nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        replicated_axis_names: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.model_axis_name = model_axis_name
        self.num_microbatches = integer("num_microbatches", num_microbatches)
        self.module_fn = module_fn
        self.replicated_axis_names = tuple(replicated_axis_names)
        # Not the mesh, which holds groups: see Axis.
        self._axis = Axis.of(mesh, model_axis_name, self.replicated_axis_names)
        self.module = _made(module_fn, self._axis)
        check_kind("what module_fn returns", self.module, nn.Module, "an nn.Module")

    def forward(self, x: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a batch; arguments, result and errors are those of :func:`execute_pipeline`."""
        check_kind("module", self.module, nn.Module, "an nn.Module")
        count = integer("num_microbatches", self.num_microbatches)
        return _execute(self.module, x, args, kwargs, count, self._axis)


def _made(module_fn: Callable[[], nn.Module], axis: Axis) -> nn.Module:
    """``module_fn()``, run with random numbers that depend on the stage."""
    random = MiniBatchSeeds([axis.device])
    with preserved([axis.device]), random.inline(0, axis.index):
        return module_fn()


def _check_batch(x: Any, num_microbatches: int, *, needed: bool) -> None:
    if x is None and not needed:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor on the first stage, not {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("x has no dimension; a batch dimension 0 is needed to split it")
    if x.size(0) % num_microbatches:
        raise ValueError(
            f"Batch size {x.size(0)} must be divisible by number of microbatches "
            f"{num_microbatches}; change one of them, or pad the batch"
        )


def _start(passage: Passage, axis: Axis, x: Any, module: nn.Module, arguments: Any) -> Tensor:
    # The output requires a gradient on all ranks or none, so the token always requires one.
    anchor = torch.empty(0, device=axis.device, requires_grad=True)
    x = x if isinstance(x, Tensor) else None
    token: Tensor = _Start.apply(passage, anchor, x, *module.parameters(), *tensors_in(arguments))
    return token


def _pass_all(
    stage: Callable[[int, Tensor], Any], count: int, passage: Passage, token: Tensor
) -> tuple[Tensor, Exception | None]:
    """Run all micro-batches through this rank's stage; stops at an exception and returns it."""
    for m in range(count):
        part, token = _Take.apply(passage, m, token)
        try:
            result = stage(m, part)
            passage.check(m, result)
        except Exception as error:  # noqa: BLE001
            return token, error
        token = _Put.apply(passage, m, token, result)
    return token, None


class _Report(NamedTuple):
    raised: str | None
    features: Features | None


def _agree(axis: Axis, failure: Exception | None, features: Features | None) -> Features:
    """Exchange errors between all stages and raise if there is one; returns the features of the
    last stage's output."""
    report = _Report(None if failure is None else repr(failure), features)
    reports = messages.all_gather_in_group(report, _Report, axis.group)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # Its traceback holds this frame.
    for stage, (raised, _) in enumerate(reports):
        if raised is not None:
            raise RuntimeError(
                f"stage {stage} of the pipeline, rank {axis.ranks[stage]}, raised {raised}; "
                "the batch was given up on all stages"
            )
    output = reports[-1].features
    assert output is not None, "the last stage has not failed"
    return output


class _Start(torch.autograd.Function):
    """Connects the pipeline's inputs and parameters to its chain, so that a backward for any of
    them runs the whole chain."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, anchor: Tensor, x: Tensor | None, *others: Tensor
    ) -> Tensor:
        ctx.passage = passage
        ctx.nothing = None if x is None else x.new_zeros(()).expand_as(x)
        ctx.others = len(others)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grad = ctx.passage.end_backward()
        return None, None, ctx.nothing if grad is None else grad, *[None] * ctx.others


class _Take(torch.autograd.Function):
    """Micro-batch ``m``."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, m: int, token: Tensor) -> tuple[Tensor, Tensor]:
        ctx.passage, ctx.m = passage, m
        ctx.set_materialize_grads(False)
        part = passage.take(m)
        if not passage.wants_grad:
            ctx.mark_non_differentiable(part)
        return part, token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[None, None, None]:
        ctx.passage.give_back(ctx.m, grad)
        return None, None, None


class _Put(torch.autograd.Function):
    """Passes on result ``m``."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, m: int, token: Tensor, result: Tensor) -> Tensor:
        ctx.passage, ctx.m = passage, m
        ctx.set_materialize_grads(False)
        passage.put(m, result)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None, Tensor | None]:
        return None, None, None, ctx.passage.grad_of(ctx.m)


class _Output(torch.autograd.Function):
    """The end of the chain: the output on the last stage, zeros on the others."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, features: Features, token: Tensor) -> Tensor:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        return passage.output(features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        # First on every rank, so that these raise before any rank waits for another.
        check_differentiated_once("a pipeline")
        _ = ctx.saved_tensors  # Raises in a second backward without retain_graph.
        ctx.passage.begin_backward(grad)
        return None, None, None
