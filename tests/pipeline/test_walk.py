"""How many functions, files and frames a reader goes through to follow a mini-batch."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from support.cuda.host_time import COMPREHENSIONS
from support.pipes import on_cpus
from torch import nn

import pipekernels

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDS = {
    "functions of a forward": 83,
    "files of a forward": 21,
    "frames around a layer": 13,
    "functions of a backward": 35,
}
PACKAGE = str(Path(pipekernels.__file__).parent)


def walked(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """The package's functions that ``call()`` runs, and those on the stack of a layer, up to
    ``Pipe.forward``, where they are most. Comprehensions belong to their functions."""
    functions: dict[CodeType, str] = {}
    deepest: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in COMPREHENSIONS:
            return
        if code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(f"{PACKAGE}/")
            functions[code] = f"{file}:{code.co_firstlineno} {code.co_name}"
        elif code is nn.Linear.forward.__code__:
            stack, above = [], frame
            while above.f_code is not pipekernels.Pipe.forward.__code__:
                assert above.f_back is not None
                above = above.f_back
                if above.f_code in functions:
                    stack.append(functions[above.f_code])
            deepest[:] = max(deepest, stack, key=len)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(functions.values()), deepest


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_mini_batch_is_a_short_walk(chunks: int) -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    pipe = on_cpus(layers, [4, 4], chunks=chunks, checkpoint="never", execution="inline")
    x = torch.randn(8, 4)
    for _ in range(2):
        pipe(x).sum().backward()
    outputs: list[torch.Tensor] = []
    forward, frames = walked(lambda: outputs.append(pipe(x)))
    loss = outputs[0].sum()
    backward, _ = walked(loss.backward)
    files = list(dict.fromkeys(function.partition(":")[0] for function in forward))
    for bound, found in zip(BOUNDS, (forward, files, frames, backward), strict=True):
        assert 0 < len(found) <= BOUNDS[bound], "\n".join([f"{len(found)} {bound}:", *found])
