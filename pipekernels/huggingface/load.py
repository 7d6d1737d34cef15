"""Loads a model from a folder of safetensors files, of which each rank reads only its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind
from pipekernels._torch_private import non_persistent_buffers
from pipekernels.huggingface.checkpoint import check_not_quantized, checkpoint_for
from pipekernels.huggingface.formats import QuantizedIntegers
from pipekernels.huggingface.pretrained import raised_on_all
from pipekernels.huggingface.sources import Source, files_kept_open
from pipekernels.tensor_parallel.data_parallel import distributed_like
from pipekernels.tensor_parallel.integers.formats import Format, StoredFormat, make_integers
from pipekernels.tensor_parallel.integers.quantize import (
    check_finite,
    check_formats,
    rounding,
)
from pipekernels.tensor_parallel.sharded import ShardedLayer

_FLOATS = ("F64", "F32", "F16", "BF16")  # Of these, a conversion is a value of the other dtype.


def load_pretrained(
    model: nn.Module,
    folder: str | Path,
    device: torch.device | str = "cpu",
    *,
    bits: int | None = None,
    group_size: int | None = None,
    progress: bool = False,
) -> None:
    """Load the files that transformers' ``save_pretrained`` wrote, in place. Each rank reads only
    its slices of sharded layers, so no rank ever holds the whole model
    (:doc:`/guides/transformers`). A collective over the ranks of the sharded layers: what one rank
    raises, all raise, with its rank.

    Of quantized checkpoints (GPTQ, AWQ, compressed-tensors) sharded linear layers and experts get
    the integers as they are, for inference, and other layers floats; of float8 in blocks, all do.

    Args:
        model: a transformers model, or any module whose state dict has the names in the files.
            Parameters and buffers may be on the meta device. They keep their dtypes.
        folder: has ``model.safetensors``, or else ``model.safetensors.index.json`` and the files
            that it names; or the one of such files that its ``config.json`` names in
            ``transformers_weights``: as for ``from_pretrained``.
        device: receives what is on the meta device; the rest stays where it is.
        bits, group_size: as for :func:`pipekernels.tensor_parallel.quantize_weights`, which this
            does for each layer when it has been read, so that no rank ever holds the whole model
            in floats; weights of quantized checkpoints are rounded again. None: no rounding.
        progress: show bars of tqdm.

    Raises:
        FileNotFoundError: there are only files of other formats or variants, or ``folder`` lacks a
            file that the index names.
        ValueError: a file or the index is malformed; the files lack a parameter or persistent
            buffer of the model, or have one of another shape, or of integers or float8 in place of
            floats; the weights are quantized in an unknown format, or so that a layer cannot take
            them; or the value of another buffer is not known. The model is then unchanged on all
            ranks.
        ImportError: safetensors is not installed.
        RuntimeError: a rank of several has another error, such as of reading.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("folder", folder, (str, Path), "a path")
    # All checks come first, on all ranks: the model is to stay unchanged if one fails.
    with raised_on_all(model), files_kept_open():
        files = checkpoint_for(model, Path(folder))
        sources = _sources(model, Path(folder), files)
        computed = _computed_buffers(model, device)
        if bits is None:
            formats: Mapping[ShardedLayer, Format] = _stored_formats(model, files, device)
            if formats:
                check_formats(formats)
        else:
            formats = rounding(model, bits, group_size)
    show: Any = import_module("tqdm").tqdm if progress else iter
    _load_layers(model, sources, device, formats, rounds=bits is not None, show=show)
    for module, buffers in computed:
        module._buffers.update(buffers)


@torch.no_grad()
def _load(sources: Iterable[tuple[_Target, Source]], device: torch.device | str) -> None:
    for target, source in sources:
        with files_kept_open():
            target.put(target.read(source), device)


def _load_layers(
    model: nn.Module,
    sources: list[tuple[_Target, Source]],
    device: torch.device | str,
    formats: Mapping[ShardedLayer, Format],
    rounds: bool,
    show: Callable[[Any], Any],
) -> None:
    """Load the layers that stay in floats, then each of the others, and quantize it at once, unless
    it reads its integers itself."""
    own: dict[Any, list[tuple[_Target, Source]]] = {layer: [] for layer in formats}
    others: list[tuple[_Target, Source]] = []
    for target, source in sources:
        owner = target.owners[0][0]
        # A head that shares its weight with an embedding gets its own.
        is_own = owner in own and all(other is owner for other, _ in target.owners)
        (own[owner] if is_own else others).append((target, source))
    with raised_on_all(model):
        _load(show(others), device)
    for layer, parts in show(own.items()):
        with raised_on_all(model):
            if rounds:
                _load(parts, device)
                check_finite(layer)
            else:
                _load(((t, source) for t, source in parts if "bias" in t.owners[0][1]), device)
                with files_kept_open():
                    make_integers(layer, formats[layer])
        if rounds:
            make_integers(layer, formats[layer])
        parts.clear()
    if own:
        model.requires_grad_(False)


def _stored_formats(
    model: nn.Module, files: Mapping[str, Source], device: torch.device | str
) -> dict[ShardedLayer, Format]:
    """Of the layers whose weights are integers in the files. ValueError if a layer has several."""
    formats: dict[ShardedLayer, Format] = {}
    for prefix, layer in model.named_modules():
        if not isinstance(layer, ShardedLayer) or layer.integers:
            continue
        names = [f"{prefix}.{name}".removeprefix(".") for name in layer.matrices]
        keys = [_key_of([name], files, model) for name in names]
        found: list[Any] = [files[key] for key in keys if key]
        matrices = [each for source in found for each in getattr(source, "matrices", [source])]
        if not any(isinstance(each, QuantizedIntegers) for each in matrices):
            continue
        layouts = {getattr(each, "layout", None) for each in matrices}
        if len(layouts) > 1:
            raise ValueError(
                f"{layer._described()} has matrices of several formats in the files, {layouts}; "
                "pass bits=8 or bits=4, which rounds weights again"
            )
        if not all(each.is_sorted for each in matrices):
            raise ValueError(
                f"{layer._described()} has integers in act-order (desc_act) in the files, where a "
                "group has input features of any places, and layers take features of one place; "
                "pass bits=8 or bits=4, which rounds weights again"
            )
        bits, group, has_zero = matrices[0].layout
        kinds = ("weight", "scale", "zero") if has_zero else ("weight", "scale")
        pieces = [{kind: source.piece(kind) for kind in kinds} for source in found]
        sources = dict(zip(layer.matrices, pieces, strict=True))
        formats[layer] = StoredFormat(bits, group, sources, device)
    return formats


def _sources(
    model: nn.Module, folder: Path, files: Mapping[str, Source]
) -> list[tuple[_Target, Source]]:
    """What is to be loaded, and from where; raises as :func:`load_pretrained`."""
    keys = [(target, _key_of(target.names, files, model)) for target in _targets(model)]
    check_not_quantized(folder, files, [key for _, key in keys])
    problems = [target.problem(files[key] if key else None) for target, key in keys]
    if problems := [problem for problem in problems if problem]:
        shown = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
        raise ValueError(
            f"{folder} does not fit {type(model).__name__}: {shown}; make the model of the "
            "configuration with which the files were saved, or load it by from_pretrained and "
            "shard it then"
        )
    return [(target, files[key]) for target, key in keys if key]


class _Target(NamedTuple):
    """A parameter or buffer and where it is: a tied one is in several places."""

    tensor: Tensor
    names: list[str]
    owners: list[tuple[nn.Module, str]]

    @property
    def shard(self) -> tuple[ShardedLayer, str] | None:
        """The layer whose shard it is, and its name there."""
        layer, name = self.owners[0]
        if isinstance(layer, ShardedLayer) and name in layer.shard_dims:
            return layer, name
        return None

    def problem(self, source: Source | None) -> str | None:
        """Why the value cannot be read from ``source``, if there is one."""
        name, tensor = self.names[0], self.tensor
        if source is None:
            return f"they lack {name!r}"
        full, shape = tuple(tensor.shape), source.shape
        if self.shard is not None:
            layer, parameter = self.shard
            full = layer.full_shape(parameter)
        if shape != full:
            return f"{name!r} has the shape {full}, in the files {shape}"
        dtype = source.dtype
        is_byte = dtype.startswith("F8") and tensor.element_size() == 1
        if tensor.is_floating_point() and dtype not in _FLOATS and not is_byte:
            return f"{name!r} has the dtype {tensor.dtype}, in the files {dtype} without a scale"
        return None

    def read(self, source: Source) -> Tensor:
        """This rank's part of ``source``, perhaps a view of a mapped file."""
        if self.shard is None:
            return source[...]
        layer, name = self.shard
        return layer._part(name, source)

    def put(self, value: Tensor, device: torch.device | str) -> None:
        """Set the value; on the meta device, by a new tensor with memory of its own."""
        tensor = self.tensor
        if not tensor.is_meta:
            tensor.copy_(distributed_like(tensor, value.to(tensor.device, tensor.dtype)))
            return
        value = torch.empty_like(tensor, device=device).copy_(value)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        for module, name in self.owners:
            setattr(module, name, value)


def _targets(model: nn.Module) -> list[_Target]:
    targets: dict[Tensor, _Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        named: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in named.items():
            if tensor is not None and name not in non_persistent_buffers(module):
                target = targets.setdefault(tensor, _Target(tensor, [], []))
                target.names.append(f"{prefix}.{name}" if prefix else name)
                target.owners.append((module, name))
    return list(targets.values())


def _key_of(names: list[str], files: Mapping[str, Source], model: nn.Module) -> str | None:
    base = f"{getattr(model, 'base_model_prefix', '')}."
    candidates = [key for name in names for key in (name, name.removeprefix(base), base + name)]
    return next((key for key in candidates if key in files), None)


def _computed_buffers(
    model: nn.Module, device: torch.device | str
) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """New values of the buffers on the meta device that are not saved, such as the frequencies of
    rotary embeddings. transformers' models compute them in their method for initial weights."""
    computed = []
    for prefix, module in model.named_modules():
        meta = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name in non_persistent_buffers(module) and buffer is not None and buffer.is_meta
        }
        if not meta:
            continue
        initialise = getattr(model, "_init_weights", None)
        values: list[dict[str, Tensor]] = []
        parameters = [p for p in module._parameters.values() if p is not None]
        if initialise is not None and all(p.is_meta for p in parameters):  # No value is lost.
            for fill in (0, 1):  # What it leaves as it was shows as a difference.
                new = {name: torch.full_like(b, fill, device=device) for name, b in meta.items()}
                module._buffers.update(new)
                try:
                    initialise(module)
                    values.append({name: module._buffers[name] for name in meta})
                finally:
                    module._buffers.update(meta)
        if not values or any(not torch.equal(values[0][name], values[1][name]) for name in meta):
            raise ValueError(
                f"{prefix!r} has buffers on the meta device, {', '.join(meta)}, that no file has; "
                "make the model, or these buffers, on a real device"
            )
        computed.append((module, values[0]))
    return computed
