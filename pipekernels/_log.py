"""``PIPEKERNELS_LOG``: shows what the package logs, on stderr.

Modules log under their own names, so the loggers of rooms are ``pipekernels.pipeline``,
``pipekernels.comm`` and so on. The package logs its choices once, when it makes them, and not in
every call.
"""

from __future__ import annotations

import logging
import os
import warnings

VARIABLE = "PIPEKERNELS_LOG"
LEVELS = ("debug", "info", "warning")
FORMAT = "%(asctime)s %(levelname)s %(name)s [pid %(process)d] %(message)s"
_seen: set[tuple[object, ...]] = set()


def info_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at level INFO, unless the same has been logged already. ``args`` must be hashable."""
    if logger.isEnabledFor(logging.INFO) and (logger.name, message, *args) not in _seen:
        _seen.add((logger.name, message, *args))
        logger.info(message, *args)


def set_up() -> None:
    """Write to stderr from the level that ``VARIABLE`` has on, or keep the package silent. Another
    value is a warning."""
    logger = logging.getLogger("pipekernels")
    logger.addHandler(logging.NullHandler())
    if logger.level == logging.NOTSET:
        # A program whose root logger is at INFO, as Ray's workers are, has not asked for ours.
        logger.setLevel(logging.WARNING)
    name = os.environ.get(VARIABLE, "").lower()
    if name in LEVELS:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.setLevel(name.upper())
    elif name:
        known = ", ".join(LEVELS)
        message = f"{VARIABLE} must be one of {known}, got {name!r}; nothing is logged"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
