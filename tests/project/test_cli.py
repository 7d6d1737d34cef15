"""The command line: ``pipekernels info``, its output and its errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipekernels import __version__, _backend, cli
from pipekernels.comm import all_reduce_limits, measure
from pipekernels.comm.all_reduce_limits import Limits

pytestmark = pytest.mark.project


def test_info_names_versions_build_and_devices() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pipekernels", "info"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    report = result.stdout.partition("\nFor bug reports:")[0]
    lines = dict(line.split(None, 1) for line in report.splitlines() if line[:1].isalpha())
    assert lines["pipekernels"] == __version__
    assert lines["torch"].startswith(torch.__version__)
    assert "Python" in lines and "triton" in lines and "CPU" in lines


def test_info_ends_with_one_line_for_bug_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    title, line = cli.info().splitlines()[-2:]
    assert title == "For bug reports:"
    parts = line.split(" | ")
    assert parts[0] == f"pipekernels {__version__}" and parts[2] == f"torch {torch.__version__}"
    assert len(parts) == 8 and "built by " in parts[6]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index > 0:d}")
    assert cli._in_one_line({}).endswith(" | extension missing | 1 x GPU 0, 2 x GPU 1")


def test_info_without_the_extension_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise ImportError("pipekernels._C cannot be loaded. Build it with `pip install .`")

    monkeypatch.setattr(_backend, "build_info", missing)
    report = cli.info()
    assert "missing" in report and "! pipekernels._C cannot be loaded" in report


def test_info_mentions_unsupported_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "build_info", lambda: {"compiler": "x", "cuda": False})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "PIPEKERNELS_CUDA=1 pip install" in cli.info()


def test_no_command_an_unknown_one_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    assert "usage: pipekernels" in shown.out and "tune" in shown.out and shown.err == ""
    with pytest.raises(SystemExit):
        cli.main(["nonsense"])
    assert "info" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pipekernels {__version__}\n"


def test_measurements_that_cannot_be_saved_are_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "measure_limits", lambda quick: Limits({2: 4096}, "today"))
    (cache / "pipekernels").touch()
    with pytest.raises(SystemExit):
        cli.main(["tune"])
    message = f"{all_reduce_limits.path()} cannot be written .*File exists.*set XDG_CACHE_HOME"
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("seconds", ["nan", "-1", "0"])
def test_tuning_for_no_time_is_an_error(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "tune", lambda **options: pytest.fail("tuning has begun"))
    with pytest.raises(SystemExit):
        cli.main(["tune", "--seconds", seconds])
    assert "--seconds must be a positive, finite number" in capsys.readouterr().err
