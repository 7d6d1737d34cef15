"""The command line: ``pipekernels info``, its output and its errors."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipekernels import __version__, _backend, cli

pytestmark = pytest.mark.project


def test_info_ends_with_one_line_for_bug_reports() -> None:
    title, line = cli.info().splitlines()[-2:]
    assert title == "For bug reports:"
    parts = line.split(" | ")
    assert parts[0] == f"pipekernels {__version__}" and "extension built by " in parts[1]
    assert f"torch {torch.__version__}" in line and cli.cpu_model() in line and "GPU" in parts[-1]


def test_the_processor_is_named_with_family_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nvendor_id\t: X\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A: B \n"
    monkeypatch.setattr(Path, "read_text", lambda self: f"{text}flags\t:\n\n{text}")
    assert cli.cpu_model() == "A: B (family 25, model 17)"
    monkeypatch.setattr(Path, "read_text", lambda self: "model name\t: C\n")
    assert cli.cpu_model() == "C"


def test_info_names_what_is_missing_and_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise ImportError("pipekernels._C cannot be loaded. Build it with `pip install .`")

    monkeypatch.setattr(_backend, "build_info", missing)
    report = cli.info()
    assert "missing" in report and "! pipekernels._C cannot be loaded" in report
    monkeypatch.setattr(_backend, "build_info", lambda: {"compiler": "x", "cuda": False})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "PIPEKERNELS_CUDA=1 pip install" in cli.info()
    native = SimpleNamespace(has_nvlink=lambda a, b: b == a + 1)
    monkeypatch.setattr(_backend, "load", lambda: native)
    assert cli._links(3) == "NVLink between 0-1, 1-2"


def test_no_command_an_unknown_one_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    assert "usage: pipekernels" in shown.out and "info" in shown.out and shown.err == ""
    with pytest.raises(SystemExit):
        cli.main(["nonsense"])
    assert "info" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pipekernels {__version__}\n"


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ("", [], "has no config.json; give the folder of a downloaded model"),
        ("config.json", [], "has no tokenizer; save or copy the model's into it"),
        ("config.json tokenizer.json", ["--dtype=fp16"], "a dtype of torch, got 'fp16'"),
        ("config.json tokenizer.json", ["--port=70000"], "cannot listen on 127.0.0.1, port 70000"),
        ("config.json tokenizer.json", ["--host=192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_serve_says_what_is_missing_before_ranks_start(
    files: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    for name in files.split():
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit):
        cli.main(["serve", str(tmp_path), *options])
    assert message in capsys.readouterr().err
