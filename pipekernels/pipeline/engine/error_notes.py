"""Notes (PEP 678) on errors of layers in a pipe, that say where each error was raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

Stages = Sequence[tuple[int, nn.Sequential]]
"""Stages with their indices."""


def name_of(stages: Stages) -> str:
    first, last = stages[0][0], stages[-1][0]
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def note_layer(
    error: Exception, stages: Stages, micro_batch: int, what: Literal["forward", "recomputation"]
) -> None:
    """Name in a note the layer that has raised ``error``. An error that no layer raised gets no
    note: it names the stage itself."""
    found = _layer(error, stages)
    if found is not None:
        _add(error, f"raised in the {what} of {found}, microbatch {micro_batch} of a pipe")


def note_backward(error: Exception, stages: Stages, micro_batch: int | None) -> None:
    """Add a note to ``error``, raised by autograd in graphs of ``stages``, that names the layer or
    stages. ``micro_batch`` is None if the graphs are of several."""
    where = _layer(error, stages) or name_of(stages)
    of = "several microbatches" if micro_batch is None else f"microbatch {micro_batch}"
    _add(error, f"raised in the backward of {where}, {of} of a pipe")


def _layer(error: Exception, stages: Stages) -> str | None:
    """The layer one of whose methods is in the traceback. ``nn.Sequential`` calls the layers, so
    only the traceback tells which one was called."""
    layers = {
        id(module): (index, stage, layer)
        for index, stage in stages
        for layer in stage.children()
        for module in layer.modules()
    }
    assert error.__traceback__ is not None
    # Skip the first frame: it has the error in a variable, and reading its f_locals would make a
    # reference cycle.
    traceback = error.__traceback__.tb_next
    while traceback is not None:
        found = layers.get(id(traceback.tb_frame.f_locals.get("self")))
        if found is not None:
            index, stage, layer = found
            names = [repr(name) for name, child in stage._modules.items() if child is layer]
            return f"layer {' or '.join(names)} ({type(layer).__name__}), stage {index}"
        traceback = traceback.tb_next
    return None


def _add(error: Exception, note: str) -> None:
    # BaseException.add_note() needs Python 3.11. Python 3.10 does not print notes.
    notes = vars(error).setdefault("__notes__", [])
    if note not in notes:  # A layer may raise the same exception object repeatedly.
        notes.append(note)
