"""Splitting into microbatches and concatenating them.

Results are exact copies for all shapes, strides and dtypes; casts equal those of ``Tensor.to``.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipekernels.ops import concat_micro_batches, split_micro_batches

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]  # These can be cast.
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
OTHERS = [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128]
DTYPES = [*FLOATING, *INTEGERS, *OTHERS]


def random_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Any bit pattern of ``dtype``, NaNs included; bools are 0 or 1."""
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1).to(device)


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor], *, cast: bool = False) -> None:
    """Compare bits, but for those of NaNs after a cast; ``ours`` must be contiguous."""
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        assert cast or a.device == b.device
        a, b = a.cpu(), b.cpu()
        if cast:
            nan = b.isnan()
            assert torch.equal(a.isnan(), nan)
            a, b = a[~nan], b[~nan]
        assert torch.equal(a.unsqueeze(-1).view(torch.uint8), b.unsqueeze(-1).view(torch.uint8))


@st.composite
def layouts(draw: st.DrawFn, batch: int, dim: int, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Arguments of :func:`lay_out`: a tensor with ``batch`` entries in dimension ``dim``."""
    dims = draw(st.integers(dim + 1, 5))
    shape = draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims))
    shape[dim] = batch
    return {
        "shape": shape,
        "order": draw(st.permutations(range(dims))),
        "step": draw(st.integers(1, 2)),
        "offset": draw(st.integers(0, 3)),
        "expand": draw(st.sampled_from([None, *range(dims)])),
        "dtype": draw(st.sampled_from(dtypes)),
    }


def lay_out(plan: dict[str, Any], device: torch.device) -> Tensor:
    """A tensor with permuted, stepped or broadcast strides, at an offset into its storage."""
    shape, order = plan["shape"], plan["order"]
    stored = [shape[d] for d in order]
    stored[-1] *= plan["step"]
    count = plan["offset"] + int(torch.Size(stored).numel())
    flat = random_tensor([count], plan["dtype"], device)[plan["offset"] :]
    tensor = flat.view(stored)[..., :: plan["step"]]
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    if plan["expand"] is not None and shape[plan["expand"]] > 0:
        tensor = tensor.narrow(plan["expand"], 0, 1).expand(shape)
    return tensor


@st.composite
def groups(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES
) -> tuple[list[dict[str, Any]], int, int]:
    dim, batch = draw(st.integers(0, 3)), draw(st.integers(0, 17))
    plans = draw(st.lists(layouts(batch, dim, dtypes), min_size=1, max_size=3))
    return plans, draw(st.integers(1, 9)), dim


def check(
    tensors: Sequence[Tensor], chunks: int, dim: int, dtype: torch.dtype | None = None
) -> None:
    """Compare a split, and a concatenation of views, with the reference."""
    given = tensors if dtype is None else [t.cpu() for t in tensors]
    expected = reference.split_micro_batches(given, chunks, dim, dtype)
    ours = split_micro_batches(tensors, chunks, dim, dtype=dtype)
    assert len(ours) == len(expected) == max(1, min(chunks, tensors[0].shape[dim]))
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs, cast=dtype is not None)
    strided = [t.tensor_split(len(ours), dim) for t in tensors]  # Views of the tensors.
    whole = reference.concat_micro_batches([given], dim, dtype)
    for parts, to in ((list(zip(*strided, strict=True)), dtype), (ours, None)):
        joined = concat_micro_batches(parts, dim, dtype=to)
        assert_same(joined, whole, cast=dtype is not None)


CASTABLE = [*FLOATING, torch.int64, torch.bool, torch.complex64]  # The last three stay.
CASES = st.one_of(
    st.tuples(groups(), st.none()), st.tuples(groups(CASTABLE), st.sampled_from(FLOATING))
)
HEALTH = [HealthCheck.function_scoped_fixture]


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=HEALTH)
@given(group_and_dtype=CASES)
def test_any_layout(group_and_dtype: Any, device: torch.device) -> None:
    (plans, chunks, dim), dtype = group_and_dtype
    check([lay_out(plan, device) for plan in plans], chunks, dim, dtype)


@pytest.mark.parametrize("to", FLOATING, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_casts_of_contiguous_runs(
    dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> None:
    """Long and short runs, aligned and not, of random bits: also subnormals and infinities."""
    x = random_tensor((9, 40, 64), dtype, device)
    for view in (x, x[:, :, 1:], x[..., :3], x.transpose(0, 1), x.transpose(1, 2)):
        for dim in (0, 1):
            check([view], 4, dim, to)


@pytest.mark.parametrize("shape", [(1024, 700), (700, 1024), (33, 5, 4099)])
def test_tensors_large_enough_for_several_threads(
    shape: tuple[int, ...], device: torch.device
) -> None:
    x = random_tensor(shape, torch.float32, device)
    for view in (x, x.transpose(0, 1), x[1:, 1:]):
        for dim, dtype in itertools.product((0, 1), (None, torch.float16)):
            check([view], 5, dim, dtype)


def test_more_micro_batches_than_one_launch_holds(device: torch.device) -> None:
    x = random_tensor((600, 3), torch.float32, device)
    parts = split_micro_batches([x, x.t().contiguous().t()], 600)
    assert_same([p[0] for p in parts], list(x.split(1)))
    assert_same([p[1] for p in parts], list(x.split(1)))
    index = torch.arange(600, device=device)
    mixed = split_micro_batches([x, index], 600, dtype=torch.float64)
    assert_same([p[0] for p in mixed], list(x.cpu().double().split(1)), cast=True)
    assert_same([p[1] for p in mixed], list(index.split(1)))


def test_more_elements_than_32_bits_can_count(device: torch.device) -> None:
    rows = 2**31 // 1024 + 3 if device.type == "cuda" else 67
    x = torch.randint(0, 255, (rows, 1024), dtype=torch.uint8, device=device)
    for dim in (0, 1):
        parts = split_micro_batches(x, 3, dim)
        for part, expected in zip(parts, x.tensor_split(3, dim), strict=True):
            assert torch.equal(part, expected)
        assert torch.equal(concat_micro_batches(parts, dim), x)


def test_results_own_their_memory(device: torch.device) -> None:
    x = torch.zeros(6, 4, device=device)
    parts = split_micro_batches(x, 3)
    parts[0].add_(1)
    assert x.sum() == 0 and parts[1].sum() == 0
    whole = concat_micro_batches(parts)
    whole.zero_()
    assert parts[0].sum() == 8


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_copies_are_ordered_on_the_current_stream(device: torch.device) -> None:
    side = torch.cuda.Stream(device)
    x = torch.zeros(64, 1000, device=device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # About 50 ms.
        x.fill_(1)
        whole = concat_micro_batches(split_micro_batches(x, 4, 1), 1)
    torch.cuda.current_stream(device).wait_stream(side)
    assert torch.equal(whole, x) and whole.sum() == x.numel()


def test_conjugate_and_negative_views(device: torch.device) -> None:
    z = torch.randn(4, 3, dtype=torch.complex64, device=device)
    for view in (z.conj(), z.conj().imag):
        assert torch.equal(torch.cat(split_micro_batches(view, 2)), view)
        assert torch.equal(concat_micro_batches([view, view]), torch.cat([view, view]))
    negated = torch.cat(split_micro_batches(z.conj().imag, 2, dtype=torch.float64))
    assert torch.equal(negated, -z.imag.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradcheck(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    make = lambda *shape: torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)

    def split(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(t for row in split_micro_batches([a, b], 2, dim) for t in row)

    for function in (split, lambda a, b: concat_micro_batches([a, b], dim)):
        inputs = (make(3, 3), make(3, 3))
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_gradients_where_only_some_tensors_need_one(device: torch.device) -> None:
    x = torch.randn(5, 2, device=device, requires_grad=True)
    y = torch.randn(5, 3, device=device)
    index = torch.arange(5, device=device)
    parts = split_micro_batches([y, x, index], 2)
    assert [t.requires_grad for t in parts[0]] == [False, True, False]
    weight = torch.randn(3, 2, device=device)
    (parts[0][1] * weight).sum().backward()  # The loss does not use the second microbatch.
    assert torch.equal(x.grad, torch.cat([weight, torch.zeros(2, 2, device=device)]))

    a = torch.randn(2, 2, device=device, requires_grad=True)
    b = torch.randn(3, 2, device=device)
    whole = concat_micro_batches([(a, index[:2]), (b, index[2:])])
    weight = torch.randn(5, 2, device=device)
    (whole[0] * weight).sum().backward()
    assert torch.equal(a.grad, weight[:2]) and b.grad is None


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_of_casts_have_the_inputs_dtype(mixed: bool, device: torch.device) -> None:
    x = torch.randn(5, 2, device=device, requires_grad=True)
    y = torch.randn(5, 3, device=device, dtype=torch.float64 if mixed else None, requires_grad=True)
    z = torch.randn(5, 3, device=device, dtype=torch.complex64, requires_grad=True)
    index = torch.arange(5, device=device)
    parts = split_micro_batches([x, index, y, z], 2, dtype=torch.bfloat16)
    assert [t.dtype for t in parts[1]] == [torch.bfloat16, torch.int64, torch.bfloat16, z.dtype]
    whole = concat_micro_batches(parts, dtype=torch.float32)
    weights = [torch.randn_like(whole[t], requires_grad=True) for t in (0, 2, 3)]

    def gradients(values: Sequence[Tensor]) -> Sequence[Tensor]:
        loss: Any = sum((w * value).sum().abs() for value, w in zip(values, weights, strict=True))
        return torch.autograd.grad(loss, (x, y, z), create_graph=True)

    grads = gradients([whole[t] for t in (0, 2, 3)])
    expected = gradients([x.bfloat16().float(), y.bfloat16().float(), z])
    for grad, other, tensor in zip(grads, expected, (x, y, z), strict=True):
        assert grad.dtype == tensor.dtype and torch.equal(grad, other)
    towards = [torch.randn_like(grad) for grad in grads]
    again = torch.autograd.grad(grads, weights, towards)
    assert all(map(torch.equal, again, torch.autograd.grad(expected, weights, towards)))


def test_a_leaf_may_be_modified_in_place_after_the_split(device: torch.device) -> None:
    x = torch.ones(4, 2, device=device, requires_grad=True)
    parts = split_micro_batches(x, 2)
    sum((p.relu_() * p).sum() for p in parts).backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_registration(needs_grad: bool, dtype: torch.dtype | None, device: torch.device) -> None:
    x = torch.randn(5, 4, device=device, requires_grad=needs_grad)
    index = torch.arange(5, device=device)
    registered = torch.ops.pipekernels
    torch.library.opcheck(registered.split_micro_batches.default, ([x, index], [3, 2], 0, dtype))
    torch.library.opcheck(registered.concat_micro_batches.default, ([x[:2], x[2:]], 1, 0, dtype))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_modes_and_the_profiler_see_the_operations(needs_grad: bool) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 2, requires_grad=needs_grad)
    seen: list[str] = []
    with Names():
        concat_micro_batches(split_micro_batches(x, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        concat_micro_batches(split_micro_batches(x, 2))
    profiled = [event.key for event in profile.key_averages()]
    for name in ("pipekernels::split_micro_batches", "pipekernels::concat_micro_batches"):
        assert name in seen and name in profiled


@pytest.mark.compile
@pytest.mark.parametrize(("dynamic", "dtype"), [(False, None), (True, torch.float64)])
def test_compiles_into_one_graph(
    dynamic: bool, dtype: torch.dtype | None, device: torch.device
) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        rows = split_micro_batches((x, y), 3, dtype=dtype)
        return concat_micro_batches([a * 2 + b for a, b in rows])

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (7, 8):
        x = torch.randn(batch, 4, device=device, requires_grad=True)
        y = torch.randn(batch, 4, device=device)
        out = compiled(x, y)
        out.sum().backward()
        assert torch.equal(out, x.to(out.dtype) * 2 + y) and out.dtype == (dtype or x.dtype)
        assert torch.equal(x.grad, torch.full_like(x, 2))


def test_tensors_that_dlpack_does_not_describe() -> None:
    """Subclasses, and before torch 2.10 all tensors: the extension reads their attributes."""
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(5))]
    parts = split_micro_batches(parameters, 2)
    assert all(type(part) is Tensor for row in parts for part in row)
    for parameter, whole in zip(parameters, concat_micro_batches(parts), strict=True):
        assert torch.equal(whole, parameter)
    for parameter, whole in zip(
        parameters, concat_micro_batches(parts, dtype=torch.bfloat16), strict=True
    ):
        assert torch.equal(whole, parameter.bfloat16())
    mixed = [parameters[0], torch.nn.Parameter(torch.arange(5), requires_grad=False)]
    first, second = split_micro_batches(mixed, 2, dtype=torch.float64)
    assert torch.equal(torch.cat([first[0], second[0]]), parameters[0].double())
    assert torch.equal(torch.cat([first[1], second[1]]), mixed[1])
