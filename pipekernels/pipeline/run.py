"""One mini-batch: its forward over all stages and the backward that may follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipekernels.pipeline import executor, schedule
from pipekernels.pipeline.checkpoint import checkpointed
from pipekernels.pipeline.context import CallerContext
from pipekernels.pipeline.lanes import intra_op_threads
from pipekernels.pipeline.micro_batch import Gather, Scatter
from pipekernels.pipeline.pace import Way
from pipekernels.pipeline.parameters import StageParameters, accumulated, installed, unique
from pipekernels.pipeline.random_state import RunRandom, preserved
from pipekernels.pipeline.schedule import Action, Program
from pipekernels.pipeline.task import Activation, Grads, Randomness, Tape

if TYPE_CHECKING:
    from pipekernels.pipeline.engine import Engine


class Run:
    """Holds what one forward leaves for its backward.

    Args:
        engine: the stages and what is known about their speed.
        inputs: tensors ``[batch, ...]``.
        wants_grad: which inputs want a gradient.
        single: whether the first stage takes a lone tensor.
        parameters: the stages' parameters, None where no backward can follow.
        chunks: the most micro-batches.
        checkpoint: one of ``checkpoint.MODES``.
    """

    def __init__(
        self,
        engine: Engine,
        inputs: Sequence[torch.Tensor],
        wants_grad: tuple[bool, ...],
        single: bool,
        parameters: Sequence[StageParameters] | None,
        chunks: int,
        checkpoint: str,
    ) -> None:
        self.grad = parameters is not None
        self.single_output = True
        self.output_wants_grad: list[bool] = []
        self._engine = engine
        self._parameters = parameters or ()
        # Detached: the graph of the inputs belongs to the autograd node, which holds this run.
        self._scatter = Scatter([t.detach() for t in inputs] if self.grad else inputs, chunks)
        self._wants_grad = wants_grad
        self._single = single
        self._context = CallerContext()
        self._random = RunRandom(engine.devices)
        micro_batches = len(self._scatter)
        self._drop = [
            self.grad and checkpointed(checkpoint, m, micro_batches) for m in range(micro_batches)
        ]
        self._key = self._pace_key()
        self._way = self._chosen_way()
        self._tasks = engine.tasks
        if self._way == "inline" and engine.chain is not None and engine.timeline is None:
            self._tasks = [engine.chain]
        self._trainable = [
            self.grad and any(self._parameters[index].pairs for index, _ in task.stages)
            for task in self._tasks
        ]
        self._program = schedule.gpipe(len(self._tasks), micro_batches)
        self._tapes: list[list[Tape | None]] = [[None] * micro_batches for _ in self._tasks]
        self._gathers: list[Gather] = []
        self._released = False
        self._seconds = 0.0
        # Intra-op threads are shared out alike on lanes and inline, so that the way taken cannot
        # show in the bits.
        self._threads = torch.get_num_threads()
        if engine.may_use_lanes:
            self._threads = max(1, self._threads // min(len(engine.stages), micro_batches))

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run every forward of the program; returns the outputs ``[batch, ...]``."""
        aliases = installed(self._parameters) if self.grad else nullcontext()
        with preserved(self._engine.devices), aliases:
            self._execute(self._program.forwards, self._forward_action, self._context.applied)
        return tuple(gather.take() for gather in self._gathers)

    def backward(
        self, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> tuple[Grads, Grads]:
        """Run every backward of the program.

        Args:
            grads: of the outputs, None for one that nobody differentiated.
            keep_graph: whether another backward may follow.

        Returns:
            The gradients of the inputs, and of the parameters.

        Raises:
            RuntimeError: an earlier backward has released the stages' graphs.
        """
        engine = self._engine
        with engine.lock:
            if self._released:
                raise RuntimeError(
                    "this is the second backward through a pipe's output, and the first one freed "
                    "the graphs of its stages; pass retain_graph=True to the first"
                )
            self._released = not keep_graph
            parts = [
                [None] * len(self._scatter) if grad is None else gather.slices(grad)
                for gather, grad in zip(self._gathers, grads, strict=True)
            ]
            output_grads: list[Grads] = list(zip(*parts, strict=True))
            again = any(self._drop)
            try:
                with (
                    preserved(engine.devices) if again else nullcontext(),
                    installed(self._parameters) if again else nullcontext(),
                ):
                    if self._tasks == [engine.chain] and not again:
                        input_grads = self._backward_at_once(output_grads, keep_graph)
                    else:
                        input_grads = self._backward_by_program(output_grads, keep_graph)
            finally:
                # After a failure too: what was accumulated must not leak into the next backward.
                parameter_grads = accumulated(unique(self._parameters), self._parameters)
        return self._joined(input_grads), tuple(parameter_grads)

    def _forward_action(self, action: Action, inputs: Activation | None) -> Activation:
        _, stage, m = action
        if inputs is None:
            inputs = Activation(self._scatter[m], self._wants_grad, self._single)
        task = self._tasks[stage]
        outputs, self._tapes[stage][m] = task.forward(
            inputs,
            self._randomness(m),
            grad=self._trainable[stage] or (self.grad and any(inputs.wants_grad)),
            drop=self._drop[m],
        )
        if stage == len(self._tasks) - 1:
            self._collect(m, outputs)
        return outputs

    def _randomness(self, m: int) -> Randomness:
        return partial(self._draw, m)

    def _collect(self, m: int, outputs: Activation) -> None:
        """Write a micro-batch of the last stage into the whole outputs; only its lane does."""
        if not self._gathers:
            self._gathers = [Gather(self._scatter.sizes) for _ in outputs.tensors]
            self.output_wants_grad = [False] * len(outputs.tensors)
            self.single_output = outputs.single
        if len(outputs.tensors) != len(self._gathers):
            raise ValueError(
                f"the last stage returned {len(outputs.tensors)} tensors for micro-batch {m} and "
                f"{len(self._gathers)} before; every micro-batch must give the same number"
            )
        for i, (tensor, wants) in enumerate(zip(outputs.tensors, outputs.wants_grad, strict=True)):
            self._gathers[i].write(m, tensor)
            self.output_wants_grad[i] |= wants

    def _backward_by_program(self, output_grads: list[Grads], keep_graph: bool) -> list[Grads]:
        """Returns the gradients of each micro-batch's inputs."""
        input_grads: list[Grads] = [()] * len(output_grads)

        def compute(action: Action, grads: Grads | None) -> Grads:
            _, stage, m = action
            if grads is None:
                grads = output_grads[m]
            task, tape = self._tasks[stage], self._tapes[stage][m]
            if not keep_graph:
                self._tapes[stage][m] = None
            if tape is None or all(grad is None for grad in grads):
                return ()
            if tape.inputs is not None:
                # The forward's autocast and the like, on a thread that may be another.
                with self._context.applied():
                    tape = task.recompute(tape, self._randomness(m))
            (result,) = task.backward([tape], [grads], keep_graph=keep_graph)
            if stage == 0:
                input_grads[m] = result
            return result

        self._execute(self._program.backwards, compute, nullcontext)
        return input_grads

    def _backward_at_once(self, output_grads: list[Grads], keep_graph: bool) -> list[Grads]:
        """On one thread, with nothing to recompute, autograd needs to be entered only once. It goes
        through the micro-batches in the program's order, the latest forward first."""
        begin = time.perf_counter()
        tapes = [tape or Tape() for tape in self._tapes[0]]
        if not keep_graph:
            self._tapes[0] = []
        with intra_op_threads(self._threads):
            assert self._engine.chain is not None
            grads = [
                grads if tape.roots else () for tape, grads in zip(tapes, output_grads, strict=True)
            ]
            input_grads = self._engine.chain.backward(tapes, grads, keep_graph=keep_graph)
        self._note_time(time.perf_counter() - begin, last=True)
        return input_grads

    def _joined(self, parts_of: Sequence[Grads]) -> Grads:
        """Each input's gradient from those of its micro-batches; zeros where one has none."""
        joined: list[torch.Tensor | None] = []
        for i, wants in enumerate(self._wants_grad):
            parts = [grads[i] if grads else None for grads in parts_of]
            present = [part for part in parts if part is not None]
            if not wants or not present:
                joined.append(None)
                continue
            whole = present[0].new_empty((self._scatter.batch, *present[0].shape[1:]))
            for piece, part in zip(whole.split(self._scatter.sizes), parts, strict=True):
                if part is None:
                    piece.zero_()
                else:
                    piece.copy_(part)
            joined.append(whole)
        return tuple(joined)

    def _execute(
        self,
        program: Program,
        compute: Callable[[Action, Any], Any],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run the forwards or the backwards, the way that was chosen for this run."""
        engine = self._engine
        if engine.timeline is not None:
            compute = engine.timeline.recorded(compute, program)
        begin = time.perf_counter()
        if self._way == "lanes":
            executor.run_on_lanes(program, compute, threads=self._threads, around=around)
        else:
            with intra_op_threads(self._threads):
                executor.run_inline(program, compute)
        seconds = time.perf_counter() - begin
        self._note_time(seconds, last=program is self._program.backwards or not self.grad)

    def _note_time(self, seconds: float, *, last: bool) -> None:
        """Add a phase's time; a run that a backward may follow counts together with it."""
        self._seconds += seconds
        if last and self._measured:
            self._engine.pace.record(self._key, self._way, self._seconds)

    def _pace_key(self) -> tuple[Any, ...]:
        """Alike for runs that take about equally long: a micro-batch's size to a factor of two, how
        many there are, and what a task does."""
        elements = sum([t.numel() for t in self._scatter[0]])
        training = any(stage.training for stage in self._engine.stages)
        return elements.bit_length(), len(self._scatter), self.grad, training, sum(self._drop)

    def _chosen_way(self) -> Way:
        """Also decides where random numbers come from: ``_draw``."""
        engine, random = self._engine, self._random
        self._draw: Callable[[int, int], AbstractContextManager[Any]] = random.inline
        self._measured = engine.may_use_lanes and min(len(engine.stages), len(self._scatter)) > 1
        if not self._measured:
            return "inline"
        if engine.pace.is_new(self._key):
            self._draw = self._audited
        way = engine.pace.choose(self._key)
        if engine.hidden_randomness:
            return "inline"
        if way == "lanes":
            self._draw = random.on_lane
        return way

    @contextmanager
    def _audited(self, m: int, stage: int) -> Iterator[None]:
        """Watch a forward for random numbers that a lane could not keep apart."""
        with self._random.audited(m, stage) as watch:
            yield
        if not watch.saw_everything():
            self._engine.hidden_randomness = True
