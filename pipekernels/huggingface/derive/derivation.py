"""Derives a plan from a small copy of a model, with all layers: by :func:`derived_plan` only.

Where the layers of a group have the same blocks of features in the same order
(:mod:`~pipekernels.huggingface.derive.flow`), the blocks are divided among the ranks: layers that
feed others become column-parallel, the layers that they feed row-parallel.

Trials find the attributes that count heads: each group is sharded over two ranks, which are
threads, and its plan is taken only if outputs and all gradients equal the whole copy's, in
evaluation and training, on one token and on a long text. Other layers are column-parallel with
gathered outputs. The model itself must be like the copy, and its heads are counted as in models
that carry a plan.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from pipekernels.huggingface.derive.flow import Flow, Group, named, pattern_of
from pipekernels.huggingface.derive.small_models import running_inputs, small_model
from pipekernels.huggingface.derive.trials import RANKS, SmallCopy
from pipekernels.tensor_parallel.full_layer import features_of, linear_classes
from pipekernels.tensor_parallel.functional import Heads
from pipekernels.tensor_parallel.plan.kinds import Kind, parse
from pipekernels.tensor_parallel.plan.sharding_plan import ShardingPlan

_log = logging.getLogger(__name__)

LEAST_FEATURES = 16
"""Least input and output features, in the small copy, of a layer that is sharded by itself."""
LENGTHS = (1, 60)
"""Of the texts on which plans are tried; a decoder's later steps have one token."""

Description: TypeAlias = dict[str, dict[str, Any]]  # Attributes by names of modules.
CountHeads: TypeAlias = Callable[[nn.Module, Mapping[str, Any]], Mapping[str, Heads]]
"""The heads of those modules of attention that a mapping names."""


class Derivation(NamedTuple):
    """The plan of a class of models and a configuration. Names are patterns."""

    kinds: dict[str, str]
    divided: dict[str, Sequence[str]]
    whole: set[str]
    """Modules whose features are in blocks of several, which ranks hold whole: heads."""
    gathered: dict[str, str]
    """Kinds of layers that are in no such group, or in one that is refused."""
    copy: Description
    """Of the small copy."""


@torch.inference_mode(False)  # Whatever the caller's thread has set.
@torch.enable_grad()
def derive(model_class: type[nn.Module], config: Any, count_heads: CountHeads) -> Derivation:
    """The plan for models of a class of transformers and a configuration. ValueError if no small
    copy can be made or run."""
    warnings = logging.getLogger("transformers")  # They would be about the small copy.
    level = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            model = small_model(model_class, config)
            flow = Flow(copy.deepcopy(model), running_inputs(model))
            whole = SmallCopy(model, [running_inputs(model, length) for length in LENGTHS])
            return _derive(flow, whole, count_heads)
    finally:
        warnings.setLevel(level)


def _derive(flow: Flow, whole: SmallCopy, count_heads: CountHeads) -> Derivation:
    found = Derivation({}, {}, set(), {}, _described(whole.model))

    def change_nothing(kinds: dict[str, str], group: Group) -> bool:
        """Tries kinds of a group, and adds them to ``found`` if so."""
        # The heads of the model itself must be known.
        names = named(flow.model, kinds)
        heads = count_heads(flow.model, names)
        counts = {heads[name][1] if name in heads else 0 for name in names}
        if group.size > 1 and counts != {group.count}:
            return False  # A rank might cut a block.
        per_head = group.per_head()
        for more, divided in product([{}, per_head] if per_head else [{}], group.attributes()):
            if whole.is_kept_by(kinds | more, divided):
                found.kinds.update(kinds | more)
                found.divided.update(divided)
                found.whole.update(kinds | more if group.size > 1 else ())
                return True
        return False

    # Equal layers of the copy, and of the model, have the same pattern, and one plan.
    for layers, group in {frozenset(group.layers): group for group in flow.groups()}.items():
        kinds = group.kinds(RANKS)
        if layers <= found.kinds.keys() or kinds is None:
            continue
        if any(found.kinds.get(name, kind) != kind for name, kind in kinds.items()):
            continue  # A layer may feed one group and be fed in another.
        if not change_nothing(kinds | group.norms(), group):
            name = type(flow.model).__name__
            _log.info("%s of %s are not in blocks to share", ", ".join(sorted(layers)), name)
    # Other wide layers in stacks: every rank gets the whole output.
    wide = [name for name in flow.sources if min(features_of(flow.layers[name])) >= LEAST_FEATURES]
    called = {pattern_of(name) for name in wide if _is_only_called(flow.model, name)}
    left = [name for name in called if "*" in name and name not in found.kinds]
    gathered = dict.fromkeys(left, "column_gather_output")
    found.gathered.update(gathered if whole.is_kept_by(gathered, {}) else {})
    return found


def _is_only_called(model: nn.Module, name: str) -> bool:
    """Whether nothing takes the weight of a layer, as kernels for GPUs do."""
    owner, _, layer = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(owner)))
    except (OSError, TypeError):  # Of a class without a file.
        return False
    return f".{layer}.weight" not in source


def _described(model: nn.Module) -> Description:
    """The class of each module, and its attributes that are flags, words, classes or the code of
    functions. Numbers are left out, as most of them are sizes; linear layers are, as they may have
    become others."""
    found: Description = {}
    inside = "-"
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(getattr(module, "base_layer", module), linear_classes()):
            inside = f"{name}."  # Of an adapter.
            continue
        own = {key: getattr(value, "__code__", value) for key, value in vars(module).items()}
        found[name] = {"class": type(module)} | {
            key: value
            for key, value in own.items()
            if key[0] != "_"
            and key not in ("training", "gradient_checkpointing")
            and isinstance(value, (bool, str, type, CodeType))
        }
    return found


def _check_alike(model: nn.Module, copy: Description, planned: Iterable[str]) -> None:
    """Raise ValueError unless the layers that have ``planned`` modules are like the copy's layers:
    each module like one at the same place, where numbers inside of a layer do not matter."""
    layers = {_layer_of(name) for name in planned}
    known = defaultdict(list)
    for name, there in copy.items():
        known[_place(name)].append(there)
    for name, own in _described(model).items():
        others = known[_place(name)]
        if _layer_of(f"{name}.") in layers and own not in others:
            unlike = [
                key for other in others[:1] for key in own | other if own.get(key) != other.get(key)
            ]
            raise ValueError(
                f"{name!r} is not like the small copy from which a plan would be derived "
                f"({', '.join(unlike) or 'it is not there'}); write a plan that names the layers "
                "which ranks can share"
            )


def _layer_of(name: str) -> str:
    """The outermost numbered module around ``name``, or else its parent."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def _place(name: str) -> str:
    layer = _layer_of(name)
    return layer + pattern_of(name.removeprefix(layer))


_known: dict[tuple[type[nn.Module], str], Derivation] = {}
_lock = threading.Lock()  # Held while a plan is derived: ranks may be threads.


def derived_plan(model: Any, count_heads: CountHeads) -> ShardingPlan:
    """The derived plan for a model of transformers; empty if nothing of it can be sharded.

    Raises:
        ValueError: the model is not like its small copy.
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    with _lock:
        if key not in _known:
            try:
                _known[key] = derive(type(model), model.config, count_heads)
            except ValueError as error:
                _log.info("no plan is derived for %s: %s", type(model).__name__, error)
                _known[key] = Derivation({}, {}, set(), {}, {})
        derivation = _known[key]
    words = named(model, derivation.kinds)
    _check_alike(model, derivation.copy, words)
    heads = count_heads(model, named(model, dict.fromkeys(derivation.whole)))
    words |= named(model, derivation.gathered)
    kinds = {name: parse(word) or Kind(word) for name, word in words.items()}
    return ShardingPlan(kinds, heads, named(model, derivation.divided))
