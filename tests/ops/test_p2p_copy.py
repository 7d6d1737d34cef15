"""``p2p_copy``: values, gradients, and when source and result may be overwritten."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cuda.recorded_streams import machine

from pipekernels.device import channel
from pipekernels.ops import p2p_copy

FLOATS = [torch.float64, torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture
def gpu(device: torch.device) -> Iterator[torch.device]:
    """A CUDA device: a fake one, then a real one."""
    if device.type == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    with machine():
        yield torch.device("cuda", 0)


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) % 7).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (), (5,), (3, 70), (2, 3, 5, 7)])
def test_to_a_gpu_and_back(gpu: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = values(dtype, shape)
    there = p2p_copy(x, gpu)
    assert there.device == gpu and there.dtype == dtype and there.shape == x.shape
    back = p2p_copy(there, "cpu")
    if dtype.itemsize == 1 and x.dim():  # Compare bytes: float8 may have no comparison.
        back, x = back.view(torch.uint8), x.view(torch.uint8)
    assert torch.equal(back, x)


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(2 * 6 * 4 * 4.0).view(2, 6, 4, 4)
    return {
        "transposed": base.transpose(1, 3),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "with holes": base[:, ::2],
        "expanded": base[:1].expand(3, -1, -1, -1),
        "a part": base[1:],
        "conjugate": torch.complex(base, base + 1).conj(),
    }


@pytest.mark.parametrize("name", layouts())
def test_any_strides(gpu: torch.device, name: str) -> None:
    x = layouts()[name]
    there = p2p_copy(x, gpu)
    assert torch.equal(p2p_copy(there, "cpu"), x)
    if name in ("transposed", "channels last", "a part"):  # These are dense.
        assert there.stride() == x.stride()
    back = p2p_copy(there.transpose(0, 1)[::2], "cpu")
    assert torch.equal(back, x.transpose(0, 1)[::2])


def test_large_tensors_are_copied_through_the_slots_in_pieces(gpu: torch.device) -> None:
    x = torch.arange(channel.SLOT_BYTES // 8 * 5 + 3)
    y = torch.arange(channel.SLOT_BYTES + 1).to(torch.uint8)
    there = p2p_copy([x, y, x], gpu)
    x_there, y_there, again = p2p_copy(there, "cpu")
    assert torch.equal(x_there, x) and torch.equal(y_there, y) and torch.equal(again, x)


def test_source_and_result_may_be_overwritten(gpu: torch.device) -> None:
    x = torch.ones(1000)
    there = p2p_copy(x, gpu)
    x.zero_()
    back = p2p_copy(there, "cpu")
    there.zero_()
    assert torch.equal(back, torch.ones(1000))


def test_it_is_differentiable(gpu: torch.device) -> None:
    x, y = torch.randn(2, 3, dtype=torch.float64).requires_grad_(), torch.arange(3)
    there, index = p2p_copy([x, y], gpu)
    assert not index.requires_grad
    loss = p2p_copy(there.square().sum(), "cpu")
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, 2 * x.detach(), rtol=0, atol=1e-12)


def test_a_tensor_already_on_the_device_is_returned_itself() -> None:
    x, y = torch.ones(2), torch.ones(3)
    assert p2p_copy(x, "cpu") is x
    moved = p2p_copy([x, y.to("meta")], "meta")
    assert moved[0].device.type == "meta" and x.device.type == "cpu"
    assert p2p_copy([], "cpu") == []


@pytest.mark.parametrize(
    ("bad", "target", "message"),
    [
        ([torch.ones(1), 3], "meta", "expected tensors, got int at position 1"),
        (torch.ones(2, 2).to_sparse(), "meta", "layout torch.sparse_coo on cpu cannot"),
        ([torch.ones(1), torch.ones(1, device="meta")], "cpu", "on meta cannot be copied to cpu"),
    ],
)
def test_bad_arguments(bad: Any, target: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        p2p_copy(bad, target)


@pytest.mark.compile
def test_it_is_a_registered_operation() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    operation = torch.ops.pipekernels.p2p_copy.default
    torch.library.opcheck(
        operation, ([x, torch.arange(2)], torch.device("meta"), False),
        test_utils=("test_schema", "test_autograd_registration"),
    )  # fmt: skip
    compiled = torch.compile(lambda t: p2p_copy(t * 2, "meta"), backend="eager", fullgraph=True)
    assert compiled(x).device.type == "meta"
