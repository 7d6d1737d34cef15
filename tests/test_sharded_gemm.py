"""The product of a linear layer: values, gradients, traces; how it is chosen, measured and overlapped."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_linear import gamma
from torch import Tensor
from torch.nn import functional

from pipekernels.kernels import table
from pipekernels.kernels.config import BLOCKS, KINDS, Blocks, Config, candidates, generation
from pipekernels.kernels.layout import layout_of
from pipekernels.kernels.table import Entry, Shape, Table, shape_class
from pipekernels.ops import overlap, sharded_gemm

# Its function of this name hides the module.
module = importlib.import_module("pipekernels.ops.sharded_gemm")

FLOAT8 = torch.float8_e4m3fn
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["forward", "grad_input", "grad_weight"]


def on_gpu(test: Any) -> Any:
    """For tests of what CPUs do not have."""
    return pytest.mark.cuda(pytest.mark.parametrize("device", ["cuda"], indirect=True)(test))


def check(y: Tensor, a: Tensor, b: Tensor, *added: Tensor, tf32: bool = False) -> None:
    """Compare ``a @ b.T`` plus the terms in ``added`` with float64.

    Sums are taken in at least float32 (float64 for float64), and up to three roundings to the
    result's dtype follow: of the product, and of each sum with a term. TF32 cuts operands off after
    10 bits. Hopper keeps at least 13 bits in sums of 128 products of float8.
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
    """Operands of a product, and what may be added to it."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor

    @classmethod
    def make(
        cls, dtype: torch.dtype, device: torch.device, m: int, n: int, k: int,
        *, out_dtype: torch.dtype | None = None, layout: str = "forward",
    ) -> Case:  # fmt: skip
        torch.manual_seed(0)

        def operand(rows: int, by_columns: bool) -> Tensor:
            data = torch.randn((k, rows) if by_columns else (rows, k), device=device).to(dtype)
            return data.t() if by_columns else data

        x, weight = operand(m, layout == "grad_weight"), operand(n, layout != "forward")
        added = [torch.randn(size, device=device) for size in ((n,), (m, n))]
        return cls(x, weight, *(term.to(out_dtype or dtype) for term in added))


@pytest.fixture(scope="module", autouse=True)
def exact_float32() -> None:
    assert not module.tf32_allowed()


# ---- values ----


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
    """What ``torch.compile`` traces, and double backward, whichever way the product is taken."""
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
        assert torch.equal(sharded_gemm(x, weight), functional.linear(x, weight))
    with torch.autocast(device.type, torch.bfloat16):
        y = sharded_gemm(torch.randn(2, 6, device=device), weight, torch.zeros(4, device=device))
    assert y.dtype == torch.bfloat16


def test_errors_state_value_limit_and_remedy() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: sharded_gemm(x, weight.t()), ValueError, r"agree in k, got \(3, 4\) and \(4, 5\)"),
        (lambda: sharded_gemm(x, weight.double()), TypeError, "float32 but weight torch.float64"),
        (lambda: sharded_gemm(x, weight, x[0]), ValueError, r"\[5\], got \(4,\)"),
        (lambda: sharded_gemm(x, weight, residual=x), ValueError, r"\(3, 5\), got \(3, 4\)"),
        (lambda: sharded_gemm(x, weight, algorithm="mm"), ValueError, "auto, triton, cublas, got"),
        (lambda: sharded_gemm(x, weight, algorithm="triton"), ValueError, "needs CUDA.*'auto'"),
        (lambda: sharded_gemm(x, weight.to("meta")), ValueError, "on one device, got cpu, meta"),
        (lambda: sharded_gemm(x, weight, scale_x=x[0]), TypeError, "belong to torch.float8_e4m3fn"),
        (
            lambda: sharded_gemm(x.to(FLOAT8), weight.to(FLOAT8), scale_x=torch.ones(2)),
            ValueError,
            "1 or 3 elements",
        ),
        (
            lambda: sharded_gemm(x.to(FLOAT8), weight.to(FLOAT8), out_dtype=torch.int32),
            TypeError,
            "out_dtype must be bfloat16",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    folder = Path(__file__).parent
    paths = [str(folder.parent), str(folder), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "interpreted_gemm.py"],
        cwd=folder, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(paths)},
    )  # fmt: skip
    reason = re.search(r"SKIPPED .*: (.* does not work .*)", result.stdout)
    if result.returncode == 5 and reason:
        pytest.skip(reason[1])
    assert result.returncode == 0, result.stdout + result.stderr


# ---- what is chosen ----


@given(
    st.sampled_from([80, 90, 100]),
    st.sampled_from(KINDS),
    *[st.integers(1, 20000)] * 3,
    st.sampled_from([4, 108, 132, 148]),
)
def test_candidates_cover_every_product(
    era: int, kind: str, m: int, n: int, k: int, sms: int
) -> None:
    found = candidates(era, kind, m, n, k, sms)
    assert found and len(set(found)) == len(found)
    choice = BLOCKS[era, kind]
    for blocks, _, split_k in found:
        assert blocks in (choice.shared if split_k > 1 else choice.whole)
        share = ceil(ceil(k / blocks.k) / split_k)
        assert share * (split_k - 1) < ceil(k / blocks.k)  # No program's share is empty.


@given(st.sampled_from(KINDS), st.sampled_from(LAYOUTS), *[st.integers(1, 1 << 20)] * 3)
def test_a_shape_class_holds_its_shapes(kind: str, layout: str, m: int, n: int, k: int) -> None:
    found = shape_class(kind, layout, m, n, k)
    assert shape_class(*found) == found  # Its largest shape is in it.
    for size, most, tokens in zip((m, n, k), found[2:], "mnk", strict=True):
        is_tokens = tokens == ("k" if layout == "grad_weight" else "m")
        assert size <= most < size * (2 if is_tokens else 1.25) + (not is_tokens and size < 8)


def test_which_gpus_take_whose_blocks() -> None:
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    assert [generation(c) for c in capabilities] == [80, 80, 80, 90, 100, 100, 80]


def test_layouts() -> None:
    rows = torch.empty(32, 64, dtype=torch.bfloat16)
    columns = torch.empty(64, 32, dtype=torch.bfloat16).t()
    assert layout_of(rows, rows) == "forward"
    assert layout_of(rows, columns) == "grad_input"
    assert layout_of(columns, columns) == "grad_weight"
    assert layout_of(columns, rows) is None
    assert layout_of(rows[:, 1:], rows) is None  # Not at a multiple of 16 bytes.
    assert layout_of(rows[:, :60], rows[:, :60]) == "forward"
    assert layout_of(torch.empty(32, 60, dtype=torch.bfloat16), rows) is None
    assert layout_of(torch.empty(1, 60, dtype=torch.bfloat16), rows) == "forward"  # One row.
    assert layout_of(rows[:1].expand(32, 64), rows) is None


CONFIG = Config(Blocks(128, 128, 64, 8, 4))
SHAPE = Shape("bfloat16", "forward", 64, 64, 64)


def measured(speedup: float = 1.5, seconds: float = 1e-3, shape: Shape = SHAPE) -> Table:
    entry = Entry(shape, CONFIG, seconds, seconds * speedup, speedup)
    entries = {shape_class(*shape): entry}
    return Table("Some GPU", "2026-01-31 12:00 UTC", {"torch": "2"}, 5e-5, entries)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that tensors are on a GPU of which a table is known; sets both."""

    def pretend(known: Table | None, capability: tuple[int, int] = (9, 0)) -> None:
        fake = module.Gpu("Some GPU", capability, generation(capability), 132)
        monkeypatch.setattr(module, "gpu_of", lambda device: fake)
        monkeypatch.setattr(overlap, "gpu_of", lambda device: fake)
        monkeypatch.setattr(table, "for_gpu", lambda name: known)
        monkeypatch.setattr(module, "has_triton", lambda: True)

    return pretend


def choice(algorithm: str, dtype: torch.dtype = torch.bfloat16, k: int = 64) -> Config | None:
    a, b, out = (torch.empty(size, dtype=dtype) for size in ((64, k), (64, k), (64, 64)))
    chosen = module.choose(a, b, out, None, algorithm)
    return None if chosen is None else chosen.config


def test_auto_takes_triton_where_it_was_measured_to_win(gpu: Any) -> None:
    gpu(None)
    assert choice("auto") is None
    gpu(measured())
    assert choice("auto") == CONFIG
    assert choice("cublas") is None
    assert choice("auto", torch.float16) is None  # Of which nothing is known,
    assert choice("auto", k=128) is None
    assert choice("auto", k=60) is None  # and odd addresses are not what was measured.
    assert choice("auto", torch.float64) is None
    gpu(measured(speedup=1.0))
    assert choice("auto") is None
    assert choice("triton") == CONFIG


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_auto_leaves_short_products_to_the_library_unless_captured(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which kernel is loaded before, and none in a capture."""
    done: list[str] = []
    monkeypatch.setattr(module, "_by_triton", lambda *arguments: done.append("triton"))
    monkeypatch.setattr(module, "_by_library", lambda *arguments: done.append("library"))
    monkeypatch.setattr(module, "_loaded", set())
    a, b, out = (torch.empty(64, 64, dtype=torch.bfloat16).as_subclass(OnGpu) for _ in range(3))

    def calls(captured: bool, algorithm: str = "auto") -> list[str]:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        done.clear()
        module.gemm_into(out, a, b, algorithm=algorithm)
        return done

    gpu(measured(seconds=1e-5))
    assert calls(captured=True) == ["library"]  # It is too late to load it.
    assert calls(captured=False) == ["triton", "library"]
    assert calls(captured=False) == ["library"]
    assert calls(captured=True) == ["triton"]
    assert calls(captured=False, algorithm="triton") == ["triton"]
    gpu(measured(seconds=1e-3))
    assert calls(captured=False) == ["triton"]
    assert calls(captured=True) == ["triton"]
    gpu(None)
    assert calls(captured=True) == ["library"]


def test_what_the_library_computes_costs_no_operation(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the first time, when the kernel is loaded, and in a capture, when the host has time."""
    captured: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(captured))
    monkeypatch.setattr(module, "_short", set())

    def through(dtype: torch.dtype = torch.bfloat16, rows: int = 64) -> bool:
        x, weight = (torch.empty(size, 64, dtype=dtype).as_subclass(OnGpu) for size in (rows, 64))
        return module._may_be_triton(x.view(-1, 1, 64), weight, dtype, "auto")

    gpu(None)
    assert not through()
    gpu(measured())
    assert through() and through()
    assert not through(torch.float64) and not through(torch.float16) and not through(rows=0)
    assert not through(rows=65)  # Of another class.
    gpu(measured(speedup=1.0))
    assert not through()
    gpu(measured(seconds=1e-5))
    assert [through(), through()] == [True, False]
    captured.append(True)
    assert through()


def test_triton_by_force(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(None)
    assert choice("triton") == candidates(90, "bfloat16", 64, 64, 64, 132)[0]
    assert choice("triton", k=60) == Config(BLOCKS[90, "bfloat16"].odd)
    with pytest.raises(TypeError, match="not torch.float64"):
        choice("triton", torch.float64)
    gpu(None, capability=(7, 5))
    with pytest.raises(RuntimeError, match="needs compute capability 8.0, but Some GPU has 7.5"):
        choice("triton")
    gpu(None, capability=(8, 0))
    with pytest.raises(RuntimeError, match="needs compute capability 8.9"):
        choice("triton", FLOAT8)
    gpu(None)
    monkeypatch.setattr(module, "has_triton", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'pipekernels\[triton\]'"):
        choice("triton")
    assert choice("auto") is None


def test_auto_takes_triton_for_float8_that_the_library_does_not_take(gpu: Any) -> None:
    gpu(None)
    a, b = torch.empty(64, 64).to(FLOAT8), torch.empty(60, 64).to(FLOAT8)
    assert module.choose(a, b, torch.empty(64, 60), None, "auto") is not None
    b = torch.empty(64, 64).to(FLOAT8)
    assert module.choose(a, b, torch.empty(64, 64, dtype=torch.bfloat16), None, "auto") is None


# ---- tables ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.for_gpu.cache_clear()
    return tmp_path


def test_what_is_saved_is_loaded_and_added_to(cache: Path) -> None:
    assert table.for_gpu("Some GPU") is None
    odd = SHAPE._replace(m=50, k=61)  # Of the same class.
    assert table.from_json(table.to_json(measured(shape=odd))) == measured(shape=odd)
    path = table.save(measured())
    assert path.is_relative_to(cache) and path.name == "sharded-gemm-some-gpu.json"
    assert table.for_gpu("Some GPU") == table.load("Some GPU") == measured()
    other = SHAPE._replace(m=128)
    table.save(measured(2.0, shape=other))
    both = table.for_gpu("Some GPU")
    assert both is not None
    assert both.entries == measured().entries | measured(2.0, shape=other).entries
    assert table.for_gpu("Another GPU") is None


def test_shipped_measurements_come_second(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "tables"
    folder.mkdir()
    monkeypatch.setattr(table, "FOLDER", folder)
    other = SHAPE._replace(m=128)
    shipped = measured()._replace(entries={**measured().entries, **measured(shape=other).entries})
    (folder / "some-gpu.json").write_text(json.dumps(table.to_json(shipped)))
    assert table.for_gpu("Some GPU") == shipped
    table.save(measured(3.0))
    found = table.for_gpu("Some GPU")
    assert found is not None
    assert found.entries == {**measured(3.0).entries, **measured(shape=other).entries}


def test_every_shipped_table_can_be_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in table.FOLDER.glob("*.json"):
            table.from_json(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"format": table.FORMAT + 1},
        {"gpu": None, "entries": 3},
        {"launch_seconds": 0},
        {"entries": [{}]},
        {"entries": [{"kind": "int8"}]},
        {"entries": [{"m": 0}]},
        {"entries": [{"seconds": -1.0}]},
        {"entries": [{"speedup": "1"}]},
        {"entries": [{"config": [[128, 128, 64, 8], 8, 1]}]},
        {"entries": [{"config": [[128, 128, 64, 8, 4.5], 8, 1]}]},
        {"entries": [{"extra": 1.0}]},
    ],
)
def test_a_bad_file_is_ignored_with_a_warning_that_says_what_to_do(
    cache: Path, change: dict[str, Any]
) -> None:
    path = table.save(measured())
    record = json.loads(path.read_text())
    entries = change.get("entries")
    if isinstance(entries, list) and entries[0]:
        change = {"entries": [record["entries"][0] | entries[0]]}
    path.write_text(json.dumps(record | change))
    table.for_gpu.cache_clear()
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(path))}.*`pipekernels tune`"):
        assert table.for_gpu("Some GPU") is None


# ---- overlap ----


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.integers(1, 50))
def test_two_machines_one_behind_the_other(gemm: float, reduce: float, row_blocks: int) -> None:
    end = 0.0
    for block in range(1, row_blocks + 1):
        end = max(end, gemm * block / row_blocks) + reduce / row_blocks
    assert overlap.overlapped_seconds(gemm, reduce, row_blocks) == pytest.approx(end)


def test_the_all_reduce_model() -> None:
    link = overlap.Link(1e-6, 1e-9, 8e-9)
    assert overlap.all_reduce_seconds(0, 8, link) == 1e-6  # One step.
    assert overlap.all_reduce_seconds(10**9, 8, link) == pytest.approx(2 * 7 / 8, rel=1e-3)
    assert overlap.all_reduce_seconds(10**9, 8, link, blocks=4) == pytest.approx(3.5, rel=1e-3)
    assert overlap.all_reduce_seconds(10**9, 8, link, blocks=64) == pytest.approx(1.75, rel=1e-3)


@given(st.integers(1, 16384), st.floats(1e-5, 1e-2), st.integers(2, 8))
def test_plans(m: int, seconds: float, ranks: int) -> None:
    link = overlap.LINKS[90]
    size = m * 8192 * 2
    found = overlap.plan(m, size, CONFIG, seconds, seconds, ranks=ranks, sms=132, link=link)
    assert found.config.blocks == CONFIG.blocks
    row_blocks = ceil(m / (found.config.blocks.m * found.config.group_m))
    assert 1 <= found.config.group_m <= 8
    assert row_blocks >= min(overlap.ROW_BLOCKS, ceil(m / CONFIG.blocks.m))
    assert found.seconds >= max(seconds, overlap.all_reduce_seconds(size, ranks, link))
    assert found.plain_seconds == seconds + overlap.all_reduce_seconds(size, ranks, link)


def test_only_measured_products_that_gain_are_overlapped(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    shape = Shape("bfloat16", "forward", 4096, 8192, 8192)
    a, b, out = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((4096, 8192), (8192, 8192), (4096, 8192))
    )
    gpu(None)
    assert overlap.plan_for(a, b, out, 2, "auto") is None
    gpu(measured(seconds=8e-4, shape=shape))
    found = overlap.plan_for(a, b, out, 2, "auto")
    assert found is not None and found.seconds * overlap.GAIN < found.plain_seconds
    capturing.append(True)  # The kernel would have to be loaded.
    assert overlap.plan_for(a, b, out, 2, "auto") is None
    monkeypatch.setattr(overlap, "_loaded", {(a.device, found.config)})
    assert overlap.plan_for(a, b, out, 2, "auto") == found
    for algorithm, ranks in (("auto", 1), ("cublas", 2), ("triton", 2)):
        assert overlap.plan_for(a, b, out, ranks, algorithm) is None
    # A product much shorter than the reduction hides little of it, and few blocks reduce slowly.
    gpu(measured(seconds=2e-5, shape=shape))
    assert overlap.plan_for(a, b, out, 8, "auto") is None
    assert overlap.plan_for(a, b, out, 8, "overlapped") is not None
    gpu(None)
    forced = overlap.plan_for(a, b, out, 8, "overlapped")
    assert forced is not None and forced.config.split_k == 1


# ---- on a GPU ----


def gpu_products() -> list[tuple[str, str, str]]:
    """Kinds and layouts, and which of the generation's blocks."""
    found = []
    for kind in KINDS:
        for layout in LAYOUTS[: 1 if kind == "float8_e4m3fn" else 3]:
            found += [(kind, layout, which) for which in ("whole", "shared", "odd")]
    return found


@on_gpu
@pytest.mark.parametrize(("kind", "layout", "which"), gpu_products())
def test_every_configuration_on_a_gpu(
    kind: str, layout: str, which: str, device: torch.device
) -> None:
    """Against float64, and as accurate as the vendor's library."""
    from pipekernels.kernels.launch import Product, launch

    own = module.gpu_of(device)
    if kind == "float8_e4m3fn" and own.capability < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    tf32 = kind == "tfloat32"
    dtype = torch.float32 if tf32 else getattr(torch, kind)
    out_dtype = torch.bfloat16 if dtype == FLOAT8 else dtype
    blocks = getattr(BLOCKS[own.generation, kind], which)
    for block in [blocks] if which == "odd" else blocks:
        for m, n, k in ((1, 256, 512), (300, 336, 1040)):
            odd = which == "odd"
            case = Case.make(
                dtype, device, m, n + odd, k + 3 * odd, out_dtype=out_dtype, layout=layout
            )
            config = Config(block, split_k=3 if which == "shared" else 1)
            results = []
            for residual in (None, case.residual):
                bias = None if residual is None else case.bias
                out = torch.full_like(case.residual, float("nan"))
                product = Product(kind, case.x, case.weight, out, bias, residual)
                launch(product, config, generation=own.generation, sms=own.sms)
                added = [] if bias is None else [bias, case.residual]
                check(out, case.x, case.weight, *added, tf32=tf32)
                results.append(out)
            # Where the library splits float32 sums, as it may, they have other errors.
            if dtype.itemsize < 4 and layout_of(case.x, case.weight) is not None:
                library = torch.empty_like(out)
                module.gemm_into(library, case.x, case.weight, algorithm="cublas")
                exact = case.x.double() @ case.weight.double().t()
                errors = [(y.double() - exact).norm() for y in (results[0], library)]
                assert errors[0] <= 1.1 * errors[1]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 1000])
def test_triton_on_a_gpu(m: int, dtype: torch.dtype, device: torch.device) -> None:
    """Forward and gradients by the operation, the same bits every time, compiled and captured."""
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

    forward = torch.compile(
        lambda x, w, b: sharded_gemm(x, w, b, algorithm="triton"), fullgraph=True
    )
    y = forward(*leaves)
    assert torch.equal(y, first[0])
    grads = torch.autograd.grad(y, leaves, case.residual)
    assert all(torch.equal(y, z) for y, z in zip(grads[:2], first[1:3], strict=True))

    static = [t.detach().clone() for t in leaves]
    graphs, outputs = [], []
    for _ in range(2):  # Both from one stream; replayed, they run at the same time.
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


@on_gpu
def test_threads_share_the_counters_of_split_k_on_a_gpu(device: torch.device) -> None:
    case = Case.make(torch.bfloat16, device, 16, 512, 4096)
    expected = sharded_gemm(case.x, case.weight, algorithm="triton")
    torch.cuda.synchronize()
    wrong = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = sharded_gemm(case.x, case.weight, algorithm="triton")
                if not torch.equal(y, expected):
                    wrong.append(y)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@on_gpu
def test_tuning_on_a_gpu(cache: Path, device: torch.device) -> None:
    """A product that was measured is taken as the table says, and both ways agree."""
    from pipekernels.kernels import tuner
    from pipekernels.ops.gemm_tuning import by_library

    shapes = [
        Shape("bfloat16", "forward", 16, 1024, 2048),
        Shape("bfloat16", "grad_weight", 1024, 1024, 1024),
    ]
    found = tuner.measure(shapes, by_library, seconds=60)
    assert [entry.shape for entry in found.entries.values()] == shapes
    own = module.gpu_of(device).name
    table.save(found)
    assert table.for_gpu(own) is not None
    for shape in shapes:
        case = Case.make(torch.bfloat16, device, *shape[2:], layout=shape.layout)
        assert layout_of(case.x, case.weight) == shape.layout
        for algorithm in ("auto", "triton"):
            check(sharded_gemm(case.x, case.weight, algorithm=algorithm), case.x, case.weight)
    table.for_gpu.cache_clear()
