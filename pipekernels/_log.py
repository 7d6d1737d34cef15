"""Shows what the package logs, where ``PIPEKERNELS_LOG`` asks for it.

Modules log under their own names, so the loggers of rooms are ``pipekernels.pipeline``,
``pipekernels.comm`` and so on. Logged is what the package chooses by itself, once when it is chosen
and not in every call.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch.distributed as dist

VARIABLE = "PIPEKERNELS_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class Formatter(logging.Formatter):
    """Lines with time, level, logger, rank and process id."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s [rank %(rank)s, pid %(process)d] %(message)s"
        )

    def format(self, record: logging.LogRecord) -> str:
        record.rank = rank()
        return super().format(record)


def rank() -> str:
    """This process's rank, by torch.distributed or else by torchrun; ``-`` if neither knows."""
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return os.environ.get("RANK", "-")


_seen: set[tuple[object, ...]] = set()


def info_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at level INFO, unless the same has been logged already. ``args`` must be hashable."""
    if logger.isEnabledFor(logging.INFO) and (logger.name, message, *args) not in _seen:
        _seen.add((logger.name, message, *args))
        logger.info(message, *args)


def set_up() -> None:
    """Keep the package silent, or write to stderr from the level that ``VARIABLE`` has on. Another
    value is a warning."""
    logger = logging.getLogger("pipekernels")
    logger.addHandler(logging.NullHandler())
    if logger.level == logging.NOTSET:
        # A program whose root logger is at INFO, as Ray's workers are, has not asked for ours.
        logger.setLevel(logging.WARNING)
    name = os.environ.get(VARIABLE, "")
    if not name:
        return
    if name.lower() not in LEVELS:
        warnings.warn(
            f"{VARIABLE} must be one of {', '.join(LEVELS)}, got {name!r}; nothing is logged",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logger.addHandler(handler)
    logger.setLevel(LEVELS[name.lower()])
