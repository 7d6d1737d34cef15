"""What the launcher hands to the kernel."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # Imports Triton.

pytest.importorskip("triton", minversion="3.6")

from pipekernels.triton_kernels import launch as launching
from pipekernels.triton_kernels.config import Blocks, Config


class Kernel:
    """Takes the place of the kernel and keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.programs.append(*grid)
        return lambda *args, **options: self.calls.append(args)


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def test_a_descriptor_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(launching.TensorDescriptor):
        def __post_init__(self) -> None:
            made.append(self)
            super().__post_init__()

    monkeypatch.setattr(launching, "gemm_kernel", kernel := Kernel())
    monkeypatch.setattr(launching, "TensorDescriptor", Counted)
    launching._descriptor_at.cache_clear()

    def launch(a: Tensor, b: Tensor, n: int = 32) -> tuple[Any, int]:
        """The descriptor of ``b``, and how many descriptors were made."""
        before = len(made)
        product = launching.Product("bfloat16", a, b, bf16(len(a), len(b)))
        config = Config(Blocks(16, n, 64, 4, 3))
        launching.launch(product, config, generation=90, sms=2)
        return kernel.calls[-1][1], len(made) - before

    x, weight = bf16(16, 64), bf16(48, 64)
    first, count = launch(x, weight)
    assert count == 3  # Of a, b and c.
    assert first.base.data_ptr() == weight.data_ptr() and first.base.dtype == torch.bfloat16
    assert (first.shape, first.strides, first.block_shape) == ([48, 64], [64, 1], [32, 64])
    again, count = launch(x, weight.detach())
    assert again is first and count <= 1  # Of c, unless it is where the first one was.
    grad = bf16(16, 48)
    transposed, _ = launch(grad, weight.t())
    assert transposed.block_shape == [64, 32]
    assert launch(grad, weight.t())[0] is transposed
    others = [(weight, 16), (weight[:40], 32), (weight[:, :56], 32), (weight[8:], 32)]
    found = {id(launch(bf16(16, b.shape[1]), b, n)[0]) for b, n in others}
    assert len(found | {id(first), id(transposed)}) == len(others) + 2
    assert launching._descriptor_at.cache_info().maxsize is not None
    memory = weakref.ref(weight)
    del weight, others
    assert memory() is None  # What is cached does not keep the weight.


def test_each_stream_and_each_capture_has_its_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    real, device = torch.zeros, torch.device("cuda", 0)
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: real(count, dtype=dtype))

    def place(stream: int, count: int = 10, capturing: bool = False) -> int:
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream)
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        kept.append(launching._zeros(device, count))
        assert kept[-1].shape == (count,) and not kept[-1].any()
        return kept[-1].data_ptr()

    kept: list[Tensor] = []
    launching._counters.cache_clear()
    assert place(7) == place(7, 20) != place(8)
    captured = {place(7, capturing=True), place(7, capturing=True)}
    assert len(captured | {place(7), place(7, count=1 << 20)}) == 4
    launching._counters.cache_clear()
