"""Pipes that run the way that the fixture ``way`` or ``place`` has chosen, where a test names none."""

from __future__ import annotations

from typing import Any

import pipekernels

execution = "auto"
"""What pipes of this module are made with."""


class Pipe(pipekernels.Pipe):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"execution": execution, **options})


class PipelineParallel(pipekernels.PipelineParallel):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"execution": execution, **options})
