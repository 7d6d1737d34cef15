"""``Pipe``: an ``nn.Sequential`` run as a pipeline of stages over microbatches."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipekernels._arguments import check_integer, integer, whole
from pipekernels._torch_private import disable_dynamo, in_forward_mode
from pipekernels.balance.blockpartition import lengths
from pipekernels.device.streams import usable
from pipekernels.ops.dispatch import deny_tangents
from pipekernels.pipeline.batchnorm import convert_deferred_batch_norm
from pipekernels.pipeline.context import MODES, Mode
from pipekernels.pipeline.engine.engine import Engine
from pipekernels.pipeline.engine.losses import Losses, LossFunction, Targets
from pipekernels.pipeline.engine.parameters import identity
from pipekernels.pipeline.microbatch import Batch
from pipekernels.pipeline.nested import Arguments, arguments_of, flatten
from pipekernels.pipeline.partition import check_sequential, layers, split_module
from pipekernels.pipeline.schedule import ScheduleName, schedule_of
from pipekernels.pipeline.skip import verify_skippables
from pipekernels.pipeline.timeline import Timeline

Device = torch.device | int | str

_MOVE_DENIED = (
    "a Pipe manages where its stages live and cannot be moved; build it with devices=[...] "
    "(Pipe.to(dtype) is allowed; with accelerate, use "
    "accelerator.prepare(pipe, device_placement=[False]))"
)


class Pipe(nn.Module):
    """Runs an ``nn.Sequential`` as a pipeline: its layers are cut into stages, each input into
    microbatches, and stages on different GPUs work on different microbatches at the same time.
    Stages on the CPU run in turn, each with all intra-op threads::

        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        pipe = Pipe(model, balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
        pipe(torch.randn(32, 64)).sum().backward()

    The interface is fairscale's and torchgpipe's, the schedule GPipe's (Huang et al., 2019). The
    pipe uses the module's own layers. To autograd it is one node; gradients have the bits of a
    loop over the microbatches. :doc:`/guides/pipe` says what layers may do, and has the rules for
    threads, ranks, ``torch.compile`` and FSDP2.

    A recomputation repeats the random numbers that its forward drew from torch's default
    generators, as under ``torch.utils.checkpoint``, but none from ``random``, NumPy or others.

    Args:
        module: the layers. Every layer takes what the one before returns: a tensor, or a tuple,
            list or dict with tensors in it. Layers may have skips (:mod:`pipekernels.skip`).
        balance: number of layers of each stage. Default: as many stages as there are devices (on a
            CPU-only machine: intra-op threads), with about equal numbers of parameters.
            ``pipekernels.balance.balance_by_time`` measures layers instead.
        devices: a device per stage; more are ignored. Default: all CUDA devices; the CPU for every
            stage where there is none.
        chunks: most microbatches per input. A batch of b is cut into ``min(chunks, b)``, of sizes
            that differ by at most one.
        checkpoint: which microbatches keep only their inputs and are recomputed in the backward:
            ``'always'``, ``'except_last'`` or ``'never'``. None are in evaluation mode.
        deferred_batch_norm: track BatchNorm's statistics over mini-batches rather than
            microbatches.
        batch_dim: dimension of all inputs and outputs along which they are cut and joined, from 0.

    Raises:
        TypeError: ``module`` is not an ``nn.Sequential``, holds a pipe or has a forward, parameters
            or hooks itself, its skips do not match, ``balance`` or ``devices`` does not list
            integers or devices.
        ValueError: an argument is out of its range, ``balance`` does not fit the module, or FSDP
            shards a layer.
        IndexError: fewer devices than stages.
        RuntimeError: torch knows no device of a name, or cannot use it.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: Mode = "except_last",
        deferred_batch_norm: bool = False,
        batch_dim: int = 0,
    ) -> None:
        super().__init__()
        # 1. Arguments are checked before the module's layers are moved or converted.
        check_sequential(module)
        if any(isinstance(layer, Pipe) for layer in module.modules()):
            raise TypeError("module holds a Pipe; put its layers there instead, to_sequential()")
        self.training = module.training
        for name, value in (("balance", balance), ("devices", devices)):
            if isinstance(value, (str, int, torch.device)):
                raise TypeError(f"{name} is {value!r}; it must be a list with an entry per stage")
        self.chunks = integer("chunks", whole(chunks))
        self.batch_dim = integer("batch_dim", batch_dim, least=0)
        checkpoint = getattr(checkpoint, "value", checkpoint)  # Also an enum, as in fairscale.
        if checkpoint not in MODES:
            raise ValueError(f"checkpoint is {checkpoint!r}; it must be one of {', '.join(MODES)}")
        verify_skippables(module)
        # 2. How many layers each stage has, and where it lives.
        gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        chosen = gpus if devices is None else list(map(usable, devices))
        # One more than a layer's parameters, so that layers without any are divided evenly too.
        if balance is None:
            sizes = [1 + sum(p.numel() for p in layer.parameters()) for layer in layers(module)]
            stages = min(len(sizes), len(chosen) or torch.get_num_threads())
            balance = lengths(sizes, stages) if sizes else []
        self.balance = list(balance)
        for i, length in enumerate(self.balance):
            check_integer("an entry of balance", length)
            self.balance[i] = int(length)
        if devices is None and not chosen:  # No GPU.
            chosen = [torch.device("cpu")] * len(self.balance)
        # 3. The stages, of the module's own layers.
        partitions = split_module(module, self.balance, chosen)
        self.devices: list[torch.device] = chosen[: len(partitions)]
        self.checkpoint = checkpoint
        self.partitions = nn.ModuleList(partitions)
        if deferred_batch_norm:
            convert_deferred_batch_norm(self.partitions, self.chunks)
        self._engine = Engine(partitions, self.devices)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a mini-batch.

        Args:
            *inputs: the first layer's arguments: tensors with a dimension ``batch_dim`` of one
                size, or tuples, lists and dicts of them. Tensors are cut into microbatches; other
                values, and tensors in ``NoChunk(tensor)``, go unsplit to every microbatch.
            **kwargs: the first layer's keyword arguments, cut the same way.

        Returns:
            The module's output, on the last stage's device, with the tensors of all microbatches
            joined along ``batch_dim``. A floating-point scalar, such as an auxiliary loss, becomes
            the mean weighted by the microbatches' rows. Any other value becomes a list
            with an entry per microbatch, except that None stays None. A pipe without layers
            returns its input.

        Raises:
            TypeError: the input, or what a stage returns, has no tensor.
            ValueError: the input cannot be split: no batch dimension, or batch sizes differ; or
                the outputs of microbatches cannot be joined along ``batch_dim``.
            RuntimeError: inside a transform of ``torch.func``, with tangents (forward-mode
                differentiation), or traced or exported (use ``pipe.to_sequential()``); or an entry
                of ``partitions`` has been replaced.
        """
        value = inputs[0] if len(inputs) == 1 and not kwargs else Arguments(inputs, kwargs)
        if not self.partitions:
            self._batch(value)  # Checks it.
            return self.to_sequential()(*inputs, **kwargs)
        return self._run(value)

    # torch.compile does not support locks.
    @disable_dynamo
    def _run(self, value: Any) -> Any:
        checkpoint = self.checkpoint if self.training else "never"
        return self._engine.run(self._batch(value), checkpoint)

    @disable_dynamo
    def train_step(
        self,
        input: Any,
        target: Any,
        loss_fn: LossFunction,
        *,
        schedule: ScheduleName = "1f1b",
        lanes: int | None = None,
        loss_reduction: str = "mean",
    ) -> Any:
        """Run forward, loss and backward of a mini-batch in one schedule, so that backwards begin
        before all forwards have ended. Accumulates into ``.grad`` like ``loss.backward()``.

        :doc:`/guides/training` compares the schedules, and shows losses that are not a mean over
        rows. Inside ``loss_fn``, stages that share a parameter have different objects for it.

        Args:
            input: the first layer's argument, as in :meth:`forward`; if it takes several, a tuple
                or a dict of them.
            target: tensors of the same batch size, split like the input; None if ``loss_fn`` takes
                outputs only.
            loss_fn: called as ``loss_fn(output, target)``, for one microbatch; returns a scalar, or
                a tuple of a scalar and other values to return, at least one of which is a tensor.
            schedule: ``'gpipe'``, ``'1f1b'``, ``'interleaved'`` or ``'zb-h1'``.
            lanes: for ``'interleaved'``: lane ``i`` runs the stages ``i``, ``i + lanes``, ...
            loss_reduction: how ``loss_fn`` reduces its rows: ``'mean'`` (microbatches are
                weighted by their share of the batch) or ``'sum'``.

        Returns:
            The loss of the mini-batch, a scalar without a graph. If ``loss_fn`` returns further
            values, a tuple of the loss and these, joined like the outputs of a forward, with
            scalars weighted like the loss.

        Raises:
            TypeError: there is no tensor in ``input``, ``target`` or what a stage returns, or
                ``loss_fn`` cannot be called or returns none.
            ValueError: an argument is out of its range, batch sizes differ, or the loss is not a
                scalar.
            RuntimeError: no loss requires a gradient, FSDP2 shards the pipe, or as :meth:`forward`.
        """
        fsdp = sys.modules.get("torch.distributed.fsdp")  # Not imported: not used.
        if fsdp is not None and isinstance(self, fsdp.FSDPModule):
            raise RuntimeError(
                "FSDP shards this pipe, and gathers parameters and reduces gradients for "
                "pipe(input) and its backward, not for train_step; use loss_fn(pipe(input), "
                "target).backward()"
            )
        if not self.partitions:
            raise RuntimeError(
                "the pipe has no layers, so there is nothing to train; use loss_fn(pipe(input), "
                "target)"
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable, got {type(loss_fn).__name__}")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'")
        batch = self._batch(arguments_of(next(self.partitions[0].children()), input))
        losses = partial(Losses, loss_fn, Targets(batch, target), loss_reduction == "mean")
        checkpoint = self.checkpoint if self.training else "never"
        return self._engine.train(batch, losses, checkpoint, schedule_of(schedule, lanes))

    def _batch(self, value: Any) -> Batch:
        if self._engine.stages.modules != list(self.partitions):
            raise RuntimeError(
                "an entry of the pipe's partitions has been replaced, and the pipe would run the "
                "former one; replace layers in it instead, pipe.partitions[i][j] = layer, or make "
                "a new pipe"
            )
        tensors, structure = flatten(value, "input", is_batch=True)
        if torch.jit.is_tracing():
            raise RuntimeError("a Pipe cannot be traced; trace pipe.to_sequential()")
        if in_forward_mode():
            deny_tangents("a Pipe", chain(tensors, self.parameters()))
        return Batch(tensors, structure, self.chunks, self.batch_dim)

    def timeline(self) -> AbstractContextManager[Timeline]:
        """Record when each action runs in the body. An outer timeline does not record there."""
        return self._engine.recorded_by(Timeline())

    def to_sequential(self) -> nn.Sequential:
        """The wrapped model: its layers, under their own names, on their present devices. Its
        state dict fits a pipe's of any balance."""
        named = [item for partition in self.partitions for item in partition._modules.items()]
        module = nn.Sequential(OrderedDict(named))  # type: ignore[arg-type]
        module.training = self.training  # The layers keep their own modes.
        return module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; parameters that stages share are listed once, in ``loss_fn`` too."""
        seen: set[int] = set()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not remove_duplicate or identity(parameter) not in seen:
                seen.add(identity(parameter))
                yield name, parameter

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.to_sequential())

    def __getitem__(self, index: int | slice) -> nn.Module:
        """Layer ``index`` of the wrapped module; negative ones count from the end. A slice gives an
        ``nn.Sequential`` of its layers."""
        return self.to_sequential()[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers of the wrapped module, in order."""
        return iter(self.to_sequential())

    def _deny_move(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: see ``devices``. Give the layers memory before making the pipe."""
        raise TypeError(_MOVE_DENIED)

    cuda = cpu = to_empty = _deny_move

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Cast with ``to(dtype)``; ``to(device)`` and ``to(tensor)`` raise a TypeError."""
        moves = bool(args) and isinstance(args[0], (torch.device, int, str, torch.Tensor))
        if moves or "device" in kwargs or "tensor" in kwargs:
            raise TypeError(_MOVE_DENIED)
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Pipe:
        """As of any module, for :meth:`to` of a module that has this one too; moves raise."""
        for device in set(self.devices):
            if fn(torch.empty(0, device=device)).device != device:
                raise TypeError(_MOVE_DENIED)
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        partitions: Any = list(self.partitions)
        self._engine = Engine(partitions, self.devices)
