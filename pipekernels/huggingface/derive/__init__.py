"""Plans for models that carry none and have no table: :func:`derived_plan` is the only entry."""

from __future__ import annotations

import logging
import threading
from typing import Any

from torch import nn

from pipekernels.huggingface.derive.derivation import Derivation, derive
from pipekernels.huggingface.derive.likeness import check_alike, named
from pipekernels.tensor_parallel.plan.kinds import Kind, parse
from pipekernels.tensor_parallel.plan.sharding_plan import ShardingPlan

__all__ = ["derived_plan"]

_log = logging.getLogger(__name__)
_known: dict[tuple[type[nn.Module], str], Derivation] = {}
_lock = threading.Lock()  # Held while a plan is derived: ranks may be threads.


def derived_plan(model: Any, config: Any) -> ShardingPlan:
    """The derived plan for a model of transformers; empty if nothing of it can be sharded.

    Raises:
        ValueError: the model is not like its small copy.
    """
    name = type(model).__name__
    key = type(model), config.to_json_string(use_diff=False)
    with _lock:
        if key not in _known:
            try:
                _known[key] = derive(type(model), config)
            except ValueError as error:
                _log.info("no plan is derived for %s: %s", name, error)
                _known[key] = Derivation({}, {}, {}, {}, {}, {})
        derivation = _known[key]
    for layers, why in derivation.refused.items():
        _log.info("%s of %s are not in blocks to share: %s", layers, name, why)
    words = named(model, derivation.kinds)
    check_alike(model, derivation.copy, words)
    counts = {n: c.blocks(model, n) for n, c in named(model, derivation.counters).items()}
    words |= named(model, derivation.gathered)
    return ShardingPlan(
        {name: parse(word) or Kind(word) for name, word in words.items()},
        {name: (count, count) for name, count in counts.items()},
        named(model, derivation.divided),
    )
