"""Measurements of this machine, kept as JSON files in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import logging
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

_log = logging.getLogger(__name__)

_MOST = 16 << 20  # Largest file in bytes, about 50,000 measurements.


def file(what: str, machine: str) -> Path:
    """The file of ``what``, by ``machine``: different machines may share a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # The XDG specification says to ignore relative paths.
        folder = os.path.expanduser("~/.cache")
    return Path(folder) / "pipekernels" / f"{what}-{slug(machine)}.json"


def slug(name: str) -> str:
    """``name`` in characters that are safe in a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def now() -> str:
    """The current date and time, as text."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def read(path: Path, format: int, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """A file's record, converted by ``parse``; ``None`` without a file, or, with a warning, if it
    is of another ``format`` or ``parse`` raises a KeyError, TypeError or ValueError."""
    try:
        record = json.loads(_content(path))
        if not isinstance(record, dict) or record.get("format") != format:
            raise ValueError(f"it is not of format {format}, which this version uses")
        parsed = parse(record)
    except (FileNotFoundError, NotADirectoryError):  # The latter if the home is /dev/null.
        _log.debug("%s does not exist", path)
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = (
            f"{path} is not used ({type(error).__name__}: {error}); write it anew with "
            "`pipekernels tune`, or delete it"
        )
        _log.warning(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None
    _log.debug("%s is used", path)
    return parsed


def _content(path: Path) -> bytes:
    """The bytes of a file; refuses pipes and devices, whose reads could block or never end."""
    # Do not wait for a pipe's writer, and do not acquire a controlling terminal.
    flags = os.O_NONBLOCK | os.O_NOCTTY
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not an ordinary file")
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise ValueError(f"it has more than {_MOST} bytes")
    return content


def write(path: Path, format: int, record: dict[str, Any]) -> Path:
    """Replace the file by ``record``, atomically, as other processes may be reading it.

    Raises:
        OSError: it cannot be written.
    """
    # A random name rather than the pid, which may be equal in two containers.
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.write_text(json.dumps({"format": format, **record}, indent=1) + "\n")
        return new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(
            f"{path} cannot be written ({error}); set XDG_CACHE_HOME to a folder where it can"
        ) from error
