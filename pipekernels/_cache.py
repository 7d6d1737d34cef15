"""Measurements of this machine, kept as JSON files in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_MOST = 16 << 20  # Bytes of a file; a thousand measurements take a fiftieth of it.


def file(what: str, machine: str) -> Path:
    """Where ``what`` of ``machine`` is kept: home folders may be shared by machines of several
    kinds."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # As the XDG Base Directory Specification says.
        folder = os.path.expanduser("~/.cache")
    return Path(folder) / "pipekernels" / f"{what}-{slug(machine)}.json"


def slug(name: str) -> str:
    """``name`` in letters that suit a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def now() -> str:
    """When something has been measured, for people to read."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def load(path: Path, parse: Callable[[Any], T]) -> T:
    """What ``parse`` makes of a file's record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no ordinary file, too large or no JSON, or ``parse`` raises one.
    """
    try:
        record = json.loads(_content(path))
    except RecursionError:
        raise ValueError("its record is nested too deeply") from None
    return parse(record)


def _content(path: Path) -> bytes:
    """What is in a file, which may be anything: a pipe that nobody writes to, or an endless
    device."""

    def opener(name: str, flags: int) -> int:
        # Not to wait for a pipe's writer, and not to make a terminal that of this process.
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not an ordinary file")
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise ValueError(f"it has more than {_MOST} bytes")
    return content


def read(path: Path, parse: Callable[[Any], T]) -> T | None:
    """As :func:`load`; but ``None`` if there is no file, and, with a warning, if :func:`load`
    raises."""
    try:
        return load(path, parse)
    except (FileNotFoundError, NotADirectoryError):  # The latter: a home such as /dev/null.
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{path} is not used ({error}); write it anew with `pipekernels tune`, or delete it",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def write(path: Path, record: Any) -> None:
    """Put ``record`` in place of the file there is, at once: other processes may be reading.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")  # Containers may share pids too.
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(
            f"{path} cannot be written ({error}); set XDG_CACHE_HOME to a folder where it can"
        ) from error
