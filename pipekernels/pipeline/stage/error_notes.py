"""Notes on errors that layers raise inside a pipe: where they were raised (PEP 678)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

Stages = Sequence[tuple[int, nn.Sequential]]
"""Stages with their indices."""


def note_layer(
    error: Exception, stages: Stages, micro_batch: int, what: Literal["forward", "recomputation"]
) -> None:
    """Have ``error`` name the layer that raised it, if one did: others name the stage where they
    matter.

    Args:
        error: what the stages have just raised.
        stages: those that ran.
        micro_batch: the one that they ran on.
        what: which of their runs.
    """
    found = _layer(error, stages)
    if found is not None:
        _add(error, f"raised in the {what} of {found}, micro-batch {micro_batch} of a pipe")


def note_backward(error: Exception, stages: Stages, micro_batch: int | None) -> None:
    """Have ``error`` name where in the backward it was raised, as far as that is known.

    Args:
        error: what autograd has just raised.
        stages: those whose graphs it went through.
        micro_batch: the one that they are of, None where they are of several.
    """
    first, last = stages[0][0], stages[-1][0]
    where = f"stage {first}" if first == last else f"stages {first} to {last}"
    where = _layer(error, stages) or where
    of = "several micro-batches" if micro_batch is None else f"micro-batch {micro_batch}"
    _add(error, f"raised in the backward of {where}, {of} of a pipe")


def _layer(error: Exception, stages: Stages) -> str | None:
    """The layer whose method is in the traceback. The loop over layers is torch's, and is not left
    for one of ours for the sake of errors."""
    layers = {
        id(module): (index, stage, layer)
        for index, stage in stages
        for layer in stage.children()
        for module in layer.modules()
    }
    assert error.__traceback__ is not None
    # The first frame has the error in a variable: its f_locals would keep both alive.
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
    # As add_note() does; Python 3.10 has none, and does not print them either.
    notes = vars(error).setdefault("__notes__", [])
    if note not in notes:  # A layer may raise one exception again and again.
        notes.append(note)
