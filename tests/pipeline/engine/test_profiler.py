"""What torch.profiler shows of a pipe."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from support.pipes import on_cpus
from torch import nn
from torch.profiler import ProfilerActivity, profile


def ranges(run: Callable[[torch.Tensor], Any]) -> Counter[str]:
    """The names of the package's ranges, without ``pipekernels::``."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run(torch.randn(6, 4))
    names = [event.name for event in found.events() if event.name.startswith("pipekernels::")]
    return Counter(name.removeprefix("pipekernels::") for name in names)


def test_every_action_has_a_range() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = on_cpus(layers, [2, 2], chunks=3, checkpoint="never")
    assert ranges(lambda x: pipe(x).sum().backward()) == {
        f"{kind} stage {stage}, microbatch {m}": 1
        for kind, stage, m in product("FB", range(2), range(3))
    }
    found = ranges(lambda x: pipe.train_step(x, x, nn.functional.mse_loss, schedule="zb-h1"))
    assert {"F", "I", "W"} <= {name.partition(" ")[0] for name in found}
    pipe.checkpoint = "except_last"
    found = ranges(lambda x: pipe(x).sum().backward())
    assert {name for name in found if "recomputation" in name} == {
        f"recomputation stage {stage}, microbatch {m}" for stage, m in product(range(2), range(2))
    }
