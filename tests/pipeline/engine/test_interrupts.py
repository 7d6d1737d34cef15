"""Exceptions and Ctrl-C in a layer: the pipe stays usable, and what it changes is restored."""

from typing import Any, cast

import pytest
import torch
from support.function_layer import FunctionLayer
from support.pipes import on_cpus
from torch import nn

from pipekernels.batchnorm import DeferredBatchNorm
from pipekernels.pipeline.context import is_checkpointing, is_recomputing

pytestmark = pytest.mark.usefixtures("one_thread")


def in_backward(x: torch.Tensor, raises: Any) -> torch.Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: raises() or grad)
    return y


def settings() -> list[Any]:
    return [
        torch.is_grad_enabled(), torch.get_num_threads(), torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(), torch._C._len_torch_function_stack(),
        is_checkpointing(), is_recomputing(),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_in_a_layer(
    tasks: str, stage: int, where: str, step: bool, error: type[BaseException]
) -> None:
    armed = False

    def raises() -> None:
        if armed:
            raise error

    def layer(x: torch.Tensor) -> torch.Tensor:
        if where == "forward" or (where == "recomputation" and is_recomputing()):
            raises()
        return in_backward(x, raises) if where == "backward" else x

    torch.manual_seed(0)
    blocks = [[nn.Linear(4, 4), nn.Dropout(0.5), DeferredBatchNorm(4)] for _ in range(3)]
    blocks[stage].insert(2, FunctionLayer(layer))
    checkpoint = "always" if where == "recomputation" else "never"
    pipe = on_cpus(
        nn.Sequential(*(nn.Sequential(*block) for block in blocks)), [1, 1, 1],
        chunks=3, checkpoint=checkpoint,
    )  # fmt: skip
    x = torch.linspace(-1, 1, 24).view(6, 4)
    initial = {key: value.clone() for key, value in pipe.state_dict().items()}

    def run() -> list[torch.Tensor]:
        pipe.load_state_dict(initial)
        pipe.zero_grad()
        torch.manual_seed(1)
        if step:
            pipe.train_step(x, None, lambda y: y.square().sum())
        else:
            with torch.autocast("cpu", torch.bfloat16):
                output = pipe(x)
            output.float().square().sum().backward()
        grads = [parameter.grad.clone() for parameter in pipe.parameters()]
        return grads + [buffer.clone() for buffer in pipe.buffers()]

    expected, before = run(), settings()
    parameters = [(m._parameters, name, p) for m in pipe.modules() for name, p in
                  m._parameters.items()]  # fmt: skip
    armed = True
    with pytest.raises(error):
        run()
    armed = False
    assert settings() == before
    assert all(owner[name] is parameter for owner, name, parameter in parameters)
    assert not cast(Any, pipe._engine.lock)._is_owned() and not pipe._engine._turns.locked()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
