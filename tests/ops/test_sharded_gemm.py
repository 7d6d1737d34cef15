"""``sharded_gemm``: values, gradients, compilation, and the choice of the algorithm."""

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any, NamedTuple

import pytest
import torch
from support.checks import assert_raises
from support.kernels.interpreter import run_apart
from support.kernels.operands import LAYOUTS, operands
from support.reference import gamma
from torch import Tensor
from torch.nn import functional

from pipekernels.ops import sharded_gemm
from pipekernels.triton_kernels.config import (
    PRECISIONS,
    TILES,
    Config,
    Gpu,
    Tiles,
    generation,
    gpu_of,
    has_triton,
    tf32_allowed,
)
from pipekernels.triton_kernels.layout import layout_of

module = importlib.import_module("pipekernels.ops.gemm")

FLOAT8 = torch.float8_e4m3fn
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def on_gpu(test: Any) -> Any:
    """Decorator: run the test with the fixture ``device`` being CUDA only."""
    return pytest.mark.cuda(pytest.mark.parametrize("device", ["cuda"], indirect=True)(test))


def check(y: Tensor, a: Tensor, b: Tensor, *added: Tensor, tf32: bool = False) -> None:
    """Compare ``a @ b.T`` plus the terms in ``added`` with float64.

    Error model: products are accumulated in at least float32 (float64 for float64). Up to three
    roundings to the result's dtype follow: of the product, and of each sum with a term. TF32
    truncates operands to 10 bits. Hopper keeps at least 13 bits in sums of 128 float8 products.
    """
    unit = torch.finfo(y.dtype).eps / 2
    bound = gamma(a.shape[1] + 20, min(unit, 2**-24)) + gamma(3, unit)
    bound += 2.1 * 2**-10 if tf32 else 0.0
    bound += gamma(128, 2**-13) if a.dtype == FLOAT8 else 0.0
    a, b = a.double(), b.double()
    exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
    for term in added:
        exact, magnitude = exact + term.double(), magnitude + term.double().abs()
    excess = (y.double() - exact).abs() - bound * magnitude
    assert y.shape == exact.shape
    assert (excess <= 0).all(), f"error exceeds its bound by {excess.max():.3e}"


class Case(NamedTuple):
    """Operands of a product, and the terms that may be added to it."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor

    @classmethod
    def make(
        cls, dtype: torch.dtype, device: torch.device, m: int, n: int, k: int,
        *, out_dtype: torch.dtype | None = None, layout: str = "forward",
    ) -> "Case":  # fmt: skip
        torch.manual_seed(0)
        make = functools.partial(torch.randn, device=device)
        x, weight = operands(layout, m, n, k, dtype, make)
        added = [torch.randn(size, device=device) for size in ((n,), (m, n))]
        return cls(x, weight, *(term.to(out_dtype or dtype) for term in added))


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = (9, 0),
    name: str = "NVIDIA H200",
) -> None:
    """Let the choice of an algorithm see a GPU."""
    fake = Gpu(name, capability, generation(capability), 132)
    monkeypatch.setattr(module, "gpu_of", lambda device: fake)
    monkeypatch.setattr(module, "has_triton", lambda: True)


@pytest.fixture(scope="module", autouse=True)
def exact_float32() -> None:
    assert not tf32_allowed()


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_gradients(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.make(dtype, device, 33, 40, 72)
    x, weight, bias, residual = leaves = [t.clone().requires_grad_() for t in case]
    y = sharded_gemm(*leaves)
    assert y.dtype == dtype
    check(y, case.x, case.weight, case.bias, case.residual)
    grad = torch.randn_like(y)
    y.backward(grad)
    check(x.grad, grad, case.weight.t())
    check(weight.grad, grad.t(), case.x.t())
    check(bias.grad[:, None], grad.t(), torch.ones_like(grad[:, :1]).t())
    assert torch.equal(residual.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_registered_operation(device: torch.device, dtype: torch.dtype) -> None:
    """``torch.library.opcheck``, and double backward."""
    case = Case.make(dtype, device, 5, 4, 6)
    operation = torch.ops.pipekernels.sharded_gemm
    rest = (None, None, None, "auto")
    check(operation(*case, *rest), *case)
    leaves = [t.clone().requires_grad_() for t in case]
    torch.library.opcheck(operation, (*leaves, *rest))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda *t: operation(*t, *rest), leaves)
        assert torch.autograd.gradgradcheck(lambda *t: operation(*t, *rest), leaves)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per_row", [False, True])
def test_float8(device: torch.device, per_row: bool, out_dtype: torch.dtype) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    case = Case.make(FLOAT8, device, 33, 48, 160, out_dtype=out_dtype)
    scales = [torch.rand(s if per_row else 1, device=device) + 0.5 for s in (33, 48)]
    y = sharded_gemm(
        case.x, case.weight, scale_x=scales[0], scale_weight=scales[1], out_dtype=out_dtype
    )
    unscaled = y.double() / scales[0].double()[:, None] / scales[1].double()
    check(unscaled.to(out_dtype), case.x, case.weight)
    check(sharded_gemm(case.x, case.weight, out_dtype=out_dtype), case.x, case.weight)
    with pytest.raises(TypeError, match="has no gradient here; detach"):
        sharded_gemm(case.x.requires_grad_(), case.weight)


@pytest.mark.parametrize("algorithm", ["auto", "cublas"])
@pytest.mark.parametrize("shape", [(0, 4, 6), (5, 0, 6), (5, 4, 0)])
def test_sizes_of_zero(shape: tuple[int, int, int], algorithm: str, device: torch.device) -> None:
    m, n, k = shape
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    bias = torch.randn(n, device=device)
    y = sharded_gemm(x, weight, bias, algorithm=algorithm)
    assert torch.equal(y, functional.linear(x, weight, bias))


def test_any_number_of_dimensions_and_autocast(device: torch.device) -> None:
    weight = torch.randn(4, 6, device=device)
    for shape in ((6,), (2, 6), (2, 0, 6), (2, 3, 5, 6)):
        x = torch.randn(shape, device=device)
        y = sharded_gemm(x, weight)
        assert y.shape == (*shape[:-1], 4)
        check(y.view(-1, 4), x.view(-1, 6), weight)
        assert sharded_gemm(x.to("meta"), weight.to("meta")).shape == (*shape[:-1], 4)
    with torch.autocast(device.type, torch.bfloat16):
        y = sharded_gemm(torch.randn(2, 6, device=device), weight, torch.zeros(4, device=device))
    assert y.dtype == torch.bfloat16


def test_errors_state_value_limit_and_remedy() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    x8, weight8 = x.to(FLOAT8), weight.to(FLOAT8)
    cases: list[tuple[type[Exception], str, Any, Any]] = [
        (TypeError, "must be a tensor, got list", ([1.0], weight), {}),
        (TypeError, "got float", (x, weight), {"bias": 0.0}),
        (ValueError, r"must agree, got \(3, 4\), \(4, 5\)", (x, weight.t()), {}),
        (TypeError, "float32 but weight torch.float64", (x, weight.double()), {}),
        (ValueError, r"got \(3, 4\), \(5, 4\), \(4,\)", (x, weight, x[0]), {}),
        (ValueError, r"\(5, 4\), \(3, 4\)", (x, weight), {"residual": x}),
        (ValueError, "auto, triton, cublas, got", (x, weight), {"algorithm": "mm"}),
        (ValueError, "needs CUDA.*'auto'", (x, weight), {"algorithm": "triton"}),
        (ValueError, "on one device, got cpu, meta", (x, weight.to("meta")), {}),
        (TypeError, "belong to torch.float8_e4m3fn", (x, weight), {"scale_x": x[0]}),
        (ValueError, "1 or 3 elements", (x8, weight8), {"scale_x": torch.ones(2)}),
        (TypeError, "out_dtype must be bfloat16", (x8, weight8), {"out_dtype": torch.int32}),
    ]
    for error, message, args, options in cases:
        assert_raises(error, message, sharded_gemm, *args, **options)


@pytest.mark.compile
@pytest.mark.processes
@pytest.mark.parametrize("level", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_the_kernel_in_the_interpreter(level: str) -> None:
    run_apart("interpreted_gemm.py", level, TRITON_INTERPRET="1")


def choice(
    algorithm: str, dtype: torch.dtype = torch.bfloat16, m: int = 64, k: int = 64
) -> Config | None:
    a, b, out = (torch.empty(size, dtype=dtype) for size in ((m, k), (64, k), (m, 64)))
    return module.choose(a, b, out, algorithm=algorithm)


def test_triton_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    assert choice("triton") == Config(TILES[90, "bfloat16"].middle)
    assert choice("triton", k=60) == Config(TILES[90, "bfloat16"].unaligned)
    assert choice("auto") is None and choice("cublas") is None
    assert_raises(TypeError, "not torch.float64", choice, "triton", torch.float64)
    pretend_gpu(monkeypatch, capability=(7, 5), name="Some GPU")
    with pytest.raises(RuntimeError, match="needs compute capability 8.0, but Some GPU has 7.5"):
        choice("triton")
    pretend_gpu(monkeypatch, capability=(8, 0))
    assert_raises(RuntimeError, "needs compute capability 8.9", choice, "triton", FLOAT8)
    pretend_gpu(monkeypatch)
    a = torch.empty(64, 64).to(FLOAT8)
    assert (
        module.choose(a, a[:60], torch.empty(64, 60)) is not None
    )  # The library does not support it.
    assert module.choose(a, a, torch.empty(64, 64, dtype=torch.bfloat16)) is None
    monkeypatch.setattr(module, "has_triton", lambda: False)
    with pytest.raises(ImportError, match=r"3.6 or newer: pip install 'pipekernels\[triton\]'"):
        choice("triton")


@pytest.mark.parametrize(
    ("version", "serves"),
    [("3.6.0", True), ("3.10.1+git", True), ("4.0rc1", True), ("3.5.1", False), (None, False)],
)
def test_an_old_triton_is_not_used(
    version: str | None, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: version)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert has_triton.__wrapped__() == serves


def gpu_products() -> list[tuple[str, str, str]]:
    """Kind, layout, and which of the generation's blocks.

    Float8 has no gradients; those of float16 have the same code as those of bfloat16.
    """
    found = []
    for precision in PRECISIONS:
        for layout in LAYOUTS[: 1 if precision in ("float8_e4m3fn", "float16") else 3]:
            found += [(precision, layout, which) for which in Tiles._fields]
    return found


@on_gpu
@pytest.mark.parametrize(("precision", "layout", "which"), gpu_products())
def test_every_configuration_on_a_gpu(
    precision: str, layout: str, which: str, device: torch.device
) -> None:
    """Errors obey the bound, and are about those of the vendor's library at most."""
    from pipekernels.triton_kernels.launch import Product, launch

    own = gpu_of(device)
    if precision == "float8_e4m3fn" and own.capability < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    tf32 = precision == "tfloat32"
    dtype = torch.float32 if tf32 else getattr(torch, precision)
    out_dtype = torch.bfloat16 if dtype == FLOAT8 else dtype
    block = getattr(TILES[own.generation, precision], which)
    for split_k in (1, 3) if which == "few" else (1,):
        for m, n, k in ((1, 256, 512), (300, 336, 1040)):
            odd = which == "unaligned"
            case = Case.make(
                dtype, device, m, n + odd, k + 3 * odd, out_dtype=out_dtype, layout=layout
            )
            config = Config(block, split_k=split_k)
            results = []
            # Each of these compiles a kernel. Only a forward has terms to add.
            for residual in (None, case.residual)[: 2 if layout == "forward" else 1]:
                bias = None if residual is None else case.bias
                out = torch.full_like(case.residual, float("nan"))
                product = Product(precision, case.x, case.weight, out, bias, residual)
                launch(product, config, generation=own.generation, sms=own.sms)
                added = [] if bias is None else [bias, case.residual]
                check(out, case.x, case.weight, *added, tf32=tf32)
                results.append(out)
            # The library may split float32 sums, which changes their errors.
            if dtype.itemsize < 4 and layout_of(case.x, case.weight) is not None:
                library = torch.empty_like(out)
                module._by_library(library, case.x, case.weight)
                exact = case.x.double() @ case.weight.double().t()
                errors = [(y.double() - exact).norm() for y in (results[0], library)]
                assert errors[0] <= 1.1 * errors[1]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 1000])
def test_triton_on_a_gpu(m: int, dtype: torch.dtype, device: torch.device) -> None:
    """Forward and gradients have the same bits every time, captured too."""
    case = Case.make(dtype, device, m, 520, 1024)

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        y = sharded_gemm(x, weight, bias, algorithm="triton")
        return y, *torch.autograd.grad(y, (x, weight, bias), case.residual)

    leaves = [t.clone().requires_grad_() for t in (case.x, case.weight, case.bias)]
    first = step(*leaves)
    check(first[0], case.x, case.weight, case.bias)
    check(first[1], case.residual, case.weight.t())
    check(first[2], case.residual.t(), case.x.t())
    for _ in range(5):
        assert all(torch.equal(y, z) for y, z in zip(step(*leaves), first, strict=True))

    static = [t.detach().clone() for t in leaves]
    graphs, outputs = [], []
    for _ in range(2):  # Both are captured on one stream, but replayed on two at the same time.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(sharded_gemm(*static, algorithm="triton"))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, first[0]) for y in outputs)
