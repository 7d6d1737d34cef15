"""Kernels compiled before the tuner runs are the ones that it launches."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.full, pytest.mark.project]

pytest.importorskip("triton", minversion="3.6")

from bench.gpu import precompile
from pipekernels.kernels import launch, tuner
from pipekernels.kernels.table import Shape

ARCHITECTURE, SMS = 90, 132


def test_every_candidate_of_the_tuner_has_a_job() -> None:
    found = {precompile.kernel_of(job) for job in precompile.jobs(precompile.shapes(), 90, SMS)}
    shapes = list(precompile.shapes())
    assert {shape.layout for shape in shapes} == {"forward", "grad_input", "grad_weight"}
    for shape in shapes:
        configs = tuner.tried(shape, 90, SMS)
        assert configs
        for config in configs:
            assert precompile.kernel_of(precompile.Job(shape, config)) in found


@pytest.mark.compile
def test_the_launch_of_another_product_with_the_same_kernel_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operands are those of the tuner, made on the CPU; Triton's cache is the folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first, second = Shape("bfloat16", "grad_input", 256, 512, 4096), (250, 1376, 4096)
    job = precompile.jobs([first], 90, SMS)[-1]
    assert precompile.build(job, ARCHITECTURE, SMS) is None
    compiled = set(tmp_path.iterdir())
    assert compiled
    m, n, k = second
    same = precompile.Job(Shape("bfloat16", "grad_input", m, n, k), job.config)
    odd = precompile.Job(Shape("bfloat16", "grad_input", m, n - 8, k), job.config)
    assert precompile.kernel_of(same) == precompile.kernel_of(job) != precompile.kernel_of(odd)
    monkeypatch.setattr(tuner, "DEVICE", "cpu")

    def start(shape: Shape) -> Any:
        product = tuner.random_product(shape)
        (kernel,) = precompile.compiled(
            ARCHITECTURE, lambda: launch.launch(product, job.config, generation=90, sms=SMS)
        )
        return kernel

    launch.gemm_kernel.device_caches.clear()  # What is found from here on is in the folder.
    assert start(same.shape).metadata.target.arch == ARCHITECTURE
    assert set(tmp_path.iterdir()) == compiled
    start(odd.shape)
    assert set(tmp_path.iterdir()) > compiled


def test_a_candidate_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(launch, "launch", fail)
    job = precompile.jobs([Shape("bfloat16", "forward", 16, 64, 64)], 90, SMS)[0]
    assert precompile.build(job, ARCHITECTURE, SMS) == "RuntimeError: no such instruction"
    assert launch.gemm_kernel is not None and not torch.cuda.is_initialized()
