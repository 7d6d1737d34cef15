"""The package is silent unless ``PIPEKERNELS_LOG`` asks for messages, or the program's own logging
does; what is logged is logged once."""

import logging
import os
import re

import pytest
import torch
from support.programs import python

from pipekernels import _backend, _log

PROGRAM = """
import logging
import torch
from torch import nn
from pipekernels import Communicator, Pipe

model = nn.Sequential(nn.ReLU(), nn.ReLU())
pipe = Pipe(model, [1, 1], devices=["cpu"] * 2, chunks=2, execution="threads")
pipe(torch.ones(4, 4))
Communicator.threads(1)  # Loads the extension.
room = logging.getLogger("pipekernels.room")
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    room.log(level, "a message")
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "levels", "rooms"),
    [
        pytest.param("", set(), set(), marks=pytest.mark.full),
        ("INFO", {"INFO", "WARNING"}, {"pipeline", "_backend", "room"}),
        pytest.param(
            "debug", {"DEBUG", "INFO", "WARNING"}, {"_backend", "room"}, marks=pytest.mark.full
        ),
    ],
)
def test_the_variable_says_from_which_level_on(
    value: str, levels: set[str], rooms: set[str]
) -> None:
    environment = {name: os.environ[name] for name in os.environ.keys() - {_log.VARIABLE}}
    environment |= {_log.VARIABLE: value} if value else {}
    lines = python("-c", PROGRAM, env=environment).stderr.splitlines()
    line = re.compile(r"\S+ \S+ (DEBUG|INFO|WARNING) pipekernels\.(\w+)\S* \[pid \d+\] .")
    found = [match.groups() for match in map(line.match, lines) if match]
    assert len(found) == len(lines)
    assert {name for name, _ in found} == levels
    assert rooms <= {room for _, room in found}


def test_a_value_that_is_no_level_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    logger = logging.getLogger("pipekernels")
    handlers = list(logger.handlers)
    request.addfinalizer(lambda: setattr(logger, "handlers", handlers))
    monkeypatch.setenv(_log.VARIABLE, "loud")
    with pytest.warns(RuntimeWarning, match="must be one of debug, info, warning, got 'loud'"):
        _log.set_up()
    assert all(isinstance(each, logging.NullHandler) for each in logger.handlers)


def test_the_same_message_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_log, "_seen", set())
    logger = logging.getLogger("pipekernels.of_this_test")
    _log.info_once(logger, "GPU %s", 0)  # Not enabled, so not yet logged.
    with caplog.at_level(logging.INFO, "pipekernels"):
        for gpu in (0, 1, 0):
            _log.info_once(logger, "GPU %s", gpu)
    assert caplog.messages == ["GPU 0", "GPU 1"]


@pytest.mark.parametrize("cuda", [False, True])
def test_gpus_without_an_extension_for_them_are_logged(
    cuda: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    built = {"cuda": cuda, "cuda_version": "13.0", "compiler": "GNU 12"}
    with caplog.at_level(logging.INFO, "pipekernels"):
        _backend._log_build(built)  # type: ignore[arg-type]
    assert "built by GNU 12, with" in caplog.messages[0]
    assert ("WARNING" in [record.levelname for record in caplog.records]) == (not cuda)


def test_what_gloo_runs_for_the_backend(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("pipekernels.distributed", exc_type=ImportError)
    monkeypatch.setattr(_log, "_seen", set())
    caplog.set_level(logging.INFO, "pipekernels.distributed")
    dist = torch.distributed
    dist.init_process_group("pipekernels", rank=0, world_size=1, store=dist.HashStore())
    try:
        for _ in range(2):
            dist.all_reduce(torch.ones(2))
            dist.all_to_all_single(torch.ones(2), torch.ones(2))
    finally:
        dist.destroy_process_group()
    assert [record.name for record in caplog.records] == [distributed.__name__]
    assert caplog.messages[0].startswith("Gloo runs alltoall_base")
