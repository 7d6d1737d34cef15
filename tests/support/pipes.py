"""Pipes whose default ``execution`` the fixtures ``execution`` and ``place`` set."""

from __future__ import annotations

from typing import Any

import pipekernels

execution = "auto"


class Pipe(pipekernels.Pipe):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"execution": execution, **options})


class PipelineParallel(pipekernels.PipelineParallel):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"execution": execution, **options})
