"""The backward of one mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from pipekernels.device.profiling import in_profile
from pipekernels.pipeline.engine.mini_batch import MiniBatch
from pipekernels.pipeline.engine.outputs import Outputs, Sink
from pipekernels.pipeline.engine.transport import Receiver
from pipekernels.pipeline.schedule.program import Action, Program
from pipekernels.pipeline.stage.error_notes import note_backward, note_layer
from pipekernels.pipeline.stage.parameters import accumulated, unique
from pipekernels.pipeline.stage.random_state import preserved
from pipekernels.pipeline.stage.split_backward import WeightBackward
from pipekernels.pipeline.stage.task import Activation, Grads, Tape, Task

T = TypeVar("T")

_AT_ONCE = Program([[Action("B", 0, 0)]])


class Backward:
    """Runs the backwards of a mini-batch; ``waiting`` is entered while autograd runs, on this
    thread or on another."""

    def __init__(
        self, mini_batch: MiniBatch, waiting: AbstractContextManager[Any] | None = None
    ) -> None:
        self._mini_batch = mini_batch
        self._waiting = nullcontext() if waiting is None else waiting
        self._second_parts: dict[tuple[int, int], WeightBackward] = {}  # by (stage, micro-batch)
        self._input_grads: list[Grads] = []
        self._released = False

    def run_all(
        self, outputs: Outputs, grads: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> list[Grads]:
        """Run every backward of the program; returns the gradients of the inputs, and of the
        parameters.

        Args:
            outputs: the object that the forward filled.
            grads: gradients of the outputs; None for an output that has none.
            keep_graph: whether another backward may follow.

        Raises:
            RuntimeError: an earlier backward has released the stages' graphs.
        """
        if self._released:
            raise RuntimeError(
                "this is the second backward through a pipe's output, and the first one freed "
                "the graphs of its stages; pass retain_graph=True to the first"
            )
        self._released = not keep_graph
        batch = self._mini_batch
        state = batch.forward_state
        run: Callable[..., Any] = self.run
        program = batch.runner.program.backwards
        if batch.tasks == [batch.stages.fused] and state is None:
            run, program = self._run_at_once, _AT_ONCE
        with (
            batch.phase(),
            outputs.given(grads),
            self.accumulating() as results,
            nullcontext() if state is None else preserved(batch.stages.devices),
            nullcontext() if state is None else state.restored(),
        ):
            batch.execute(program, partial(run, outputs, keep_graph))
        return results

    @contextmanager
    def accumulating(self) -> Iterator[list[Grads]]:
        """Yield a list, which gets the gradients of the inputs, and of the parameters, of the
        backwards in the body. After a failure they are dropped: they must not leak into the next
        backward."""
        batch, results = self._mini_batch, list[Grads]()
        batch.stages.deny_foreign_backwards(batch.parameters)
        self._input_grads = [()] * len(batch.inputs)
        try:
            yield results
            if batch.transport.arrivals:
                for m in range(len(batch.inputs)):
                    batch.transport.receive(Receiver(-1, m, backward=True))
            results.append(batch.inputs.joined(self._input_grads))
        finally:
            self._second_parts.clear()
            batch.skips.forget_grads()
            self._input_grads = []
            results.append(tuple(accumulated(unique(batch.parameters), batch.parameters)))

    def run(self, sink: Sink, keep_graph: bool, action: Action, grads: Grads | None) -> Grads:
        """Run a stage's backward, whole or a part, on the gradients of its outputs, None if
        ``sink`` has them; returns those of its inputs."""
        kind, stage, m = action
        batch = self._mini_batch
        task = batch.tasks[stage]
        if kind == "W":
            second_part = self._second_parts.pop((stage, m), None)
            if second_part is not None:
                self._autograd(task, m, partial(second_part, keep_graph))
            return ()
        if batch.transport.arrivals:
            batch.transport.receive(Receiver(stage, m, backward=True))
        if grads is None:
            with self._waiting, batch.runner.in_backward():
                grads = sink.grads(m)
        tape = batch.tapes[stage][m]
        if not keep_graph:
            batch.tapes[stage][m] = None
        if tape is None:
            return ()
        if tape.sent:
            grads = grads or (None,) * tape.outputs
            grads = (*grads, *batch.skips.take_grads(tape.sent, m))
        if all(grad is None for grad in grads):
            return ()
        if tape.inputs is not None:
            tape = self._recompute(tape, tape.inputs, stage, m)
        # Not in two parts if tensors have hooks: each part would call them.
        if kind == "I" and not batch.runner.saw_tensor_hooks:
            compute = partial(task.backward_of_inputs, tape, grads, keep_graph=keep_graph)
            result, second_part = self._autograd(task, m, compute)
            if second_part is not None:
                self._second_parts[stage, m] = second_part
        else:
            whole = partial(task.backward, [tape], [grads], keep_graph=keep_graph)
            (result,) = self._autograd(task, m, whole)
        if tape.received:
            n = len(result) - len(tape.received)
            skips = dict(zip(tape.received, result[n:], strict=True))
            batch.skips.leave_grads(skips, m, batch.transport)
            result = result[:n]
        result = batch.send_back(result, stage, m)
        if stage == 0:
            self._input_grads[m] = result
        return result

    def _run_at_once(self, sink: Sink, keep_graph: bool, action: Action, _: Any) -> None:
        """Enter autograd once for all micro-batches: possible on one thread with nothing to
        recompute. Autograd takes the latest forward first, as the program does."""
        batch = self._mini_batch
        # No tape is None here: parameters or inputs want gradients.
        tapes = [tape for tape in batch.tapes[0] if tape is not None]
        if not keep_graph:
            batch.tapes[0] = []
        grads = [sink.grads(m) for m in range(len(tapes))]
        compute = partial(batch.tasks[0].backward, tapes, grads, keep_graph=keep_graph)
        results = self._autograd(batch.tasks[0], 0 if len(tapes) == 1 else None, compute)
        self._input_grads = [batch.send_back(result, 0, m) for m, result in enumerate(results)]

    def _autograd(self, task: Task, m: int | None, compute: Callable[[], T]) -> T:
        """Call ``compute``, which runs autograd on graphs of micro-batch ``m``, of all if None."""
        try:
            with self._waiting, self._mini_batch.runner.in_backward():
                return compute()
        except Exception as error:
            note_backward(error, task.stages, m)
            raise

    def _recompute(self, tape: Tape, inputs: Activation, stage: int, m: int) -> Tape:
        """The tape of a second forward on the ``inputs`` of ``tape``."""
        batch = self._mini_batch
        if inputs.versions() != batch.versions[stage, m]:
            raise RuntimeError(
                f"an input of stage {stage} was modified in place after the stage was given it, "
                "and checkpointing needs it to recompute the stage; modify a copy, or use "
                "checkpoint='never'"
            )
        # With the forward's autocast and other settings: this may be another thread.
        task, context = batch.tasks[stage], batch.context
        assert context is not None
        try:
            shown = in_profile("recomputation stage %d, micro-batch %d", stage, m)
            with context.applied(), shown:
                return task.recompute(tape, partial(batch.runner.seeded, m))
        except Exception as error:
            note_layer(error, task.stages, m, "recomputation")
            raise
