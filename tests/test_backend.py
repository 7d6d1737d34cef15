"""Loading the extension: build information, and errors that name the remedy."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipekernels
from pipekernels import _backend


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    _backend.load.cache_clear()
    yield
    _backend.load.cache_clear()


def test_build_info() -> None:
    info = _backend.build_info()
    assert info["version"] == pipekernels.__version__
    assert info["compiler"]
    assert _backend.has_cuda() is info["cuda"]
    assert bool(info["cuda_architectures"]) is bool(info["cuda_version"]) is info["cuda"]


@pytest.mark.parametrize("is_source", [False, True])
def test_missing_extension(
    is_source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pipekernels._C", None)
    monkeypatch.setattr(_backend, "__file__", str(tmp_path / "pipekernels" / "_backend.py"))
    if is_source:
        (tmp_path / "setup.py").touch()
    with pytest.raises(ImportError, match=r"cannot be loaded .*`pip install \.`") as error:
        _backend.load()
    assert (f"leave the source folder {tmp_path}." in str(error.value)) is is_source


def test_extension_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "__version__", "0.0.0")
    with pytest.raises(ImportError, match=r"the package is 0\.0\.0.*`pip install \.`"):
        _backend.load()
