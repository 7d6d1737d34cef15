"""Pipes and torch's compilers: compiled and scripted layers, compiled programs."""

import copy
import sys
from typing import Any

import pytest
import torch
from support.pipes import assert_same_gradients, mlp, on_cpus, outcome
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters


@pytest.mark.compile
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_compiled_layers(checkpoint: Any, tasks: str) -> None:
    module, x = mlp(), torch.randn(6, 4, dtype=torch.float64)
    layers: Any = (torch.compile(layer, backend="aot_eager") for layer in module)
    compiled = nn.Sequential(*layers)
    pipe = on_cpus(compiled, [2, 2], chunks=2, checkpoint=checkpoint)
    torch.testing.assert_close(outcome(pipe, x), outcome(module, x), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script does not support it")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_scripted_layers(checkpoint: Any, tasks: str) -> None:
    layers = [*mlp(), nn.BatchNorm1d(2).double().eval()]
    module = nn.Sequential(*map(torch.jit.script, copy.deepcopy(layers)))
    pipe = on_cpus(module, [2, 3], chunks=2, checkpoint=checkpoint)
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = outcome(nn.Sequential(*layers), x)
    for _ in range(2):
        torch.testing.assert_close(outcome(pipe, x), expected, rtol=0, atol=1e-10)


@pytest.mark.compile
def test_a_compiled_program_has_one_graph_break_per_call(recwarn: pytest.WarningsRecorder) -> None:
    """Code around a pipe is compiled, compiled layers stay compiled, and there is no warning."""
    torch._dynamo.reset()
    counters.clear()
    around, inside = CompileCounter(), CompileCounter()
    module = mlp()
    reference = copy.deepcopy(module)
    layers: list[Any] = [torch.compile(module[0], backend=inside), *list(module)[1:]]
    pipe = on_cpus(nn.Sequential(*layers), [2, 2], chunks=2)

    @torch.compile(backend=around)
    def loss(x: torch.Tensor) -> torch.Tensor:
        return pipe(x.sin()).square().mean()

    @torch.compile(backend=around)
    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * pipe.train_step(x.sin(), None, lambda y: y.square().mean())

    x = torch.randn(6, 4, dtype=torch.float64)
    expected = 2 * reference(x.sin()).square().mean()
    expected.backward()
    loss(x).backward()
    torch.testing.assert_close(step(x), expected.detach(), rtol=0, atol=1e-12)
    assert_same_gradients(module, reference)
    # Compiled layers may have other breaks, due to the modes that watch the first pass.
    named = ("Pipe.", "torch/_compile.py")  # Torch 2.6 names the file of torch.compiler.disable.
    breaks = [n for why, n in counters["graph_break"].items() if any(map(why.__contains__, named))]
    # One in each program, and one in what the program then calls, which has no operations: forward,
    # whose break has the same reason as the program's, or what train_step is.
    assert breaks and sorted(breaks)[:-1] == [1] * (len(breaks) - 1) and max(breaks) <= 2
    assert around.frame_count == 4  # Before and after the pipe, in both programs.
    old = torch.__version__.startswith("2.6.")  # It compiles nothing that a graph break calls.
    assert inside.frame_count > 0 or old
    # Dynamo warns of Python 3.13.0.
    assert not [w for w in recwarn.list if "Consider upgrading to Python" not in str(w.message)]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Pipe\._run|skip function _run"):
        torch.compile(pipe, fullgraph=True)(x)
