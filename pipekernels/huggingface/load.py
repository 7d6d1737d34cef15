"""Loads a model from a folder of safetensors files, of which each rank reads only its slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind
from pipekernels._torch_private import non_persistent_buffers
from pipekernels.huggingface.checkpoint import Slice, check_not_quantized, checkpoint_for
from pipekernels.huggingface.pretrained import raised_on_all
from pipekernels.tensor_parallel.data_parallel import distributed_like
from pipekernels.tensor_parallel.integers.quantize import Quantization, check_finite
from pipekernels.tensor_parallel.sharded import ShardedLayer

_FLOATS = ("F64", "F32", "F16", "BF16")  # Of these, a conversion is a value of the other dtype.


def load_pretrained(
    model: nn.Module,
    folder: str | Path,
    device: torch.device | str = "cpu",
    *,
    bits: int | None = None,
    group_size: int | None = None,
) -> None:
    """Load the files that transformers' ``save_pretrained`` wrote, in place. Each rank reads only
    its slices of sharded layers, so no rank ever holds the whole model
    (:doc:`/guides/transformers`). A collective over the ranks of the sharded layers: what one rank
    raises, all raise, with its rank.

    Args:
        model: a transformers model, or any module whose state dict has the names in the files.
            Parameters and buffers may be on the meta device. They keep their dtypes.
        folder: has ``model.safetensors``, or else ``model.safetensors.index.json`` and the files
            that it names; or the one of such files that its ``config.json`` names in
            ``transformers_weights``: as for ``from_pretrained``.
        device: receives what is on the meta device; the rest stays where it is.
        bits, group_size: as for :func:`pipekernels.tensor_parallel.quantize_weights`, which this
            does for each layer when it has been read, so that no rank ever holds the whole model
            in floats. None: no quantization.

    Raises:
        FileNotFoundError: there are only files of other formats or variants, or a file that the
            index names is missing.
        ValueError: a file or the index is malformed, or the index names files of other folders;
            the files lack a parameter or persistent buffer of the model, or have one of another
            shape, or of integers or float8 in place of floats; the weights are quantized (load
            them by ``from_pretrained`` and shard the model then); or the value of another buffer
            is not known. The model is then unchanged on all ranks.
        ImportError: safetensors is not installed.
        RuntimeError: a rank of several has another error, such as of reading.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("folder", folder, (str, Path), "a path")
    # All checks come first, on all ranks: the model is to stay unchanged if one fails.
    with raised_on_all(model):
        sources = _sources(model, Path(folder))
        computed = _computed_buffers(model, device)
        quantization = None if bits is None else Quantization(model, bits, group_size)
    if quantization is not None:
        _load_quantized(model, sources, device, quantization)
    else:
        with raised_on_all(model):
            _load(sources, device)
    for module, buffers in computed:
        module._buffers.update(buffers)


@torch.no_grad()
def _load(sources: Iterable[tuple[_Target, Slice]], device: torch.device | str) -> None:
    for target, source in sources:
        target.put(target.read(source()), device)


def _load_quantized(
    model: nn.Module,
    sources: list[tuple[_Target, Slice]],
    device: torch.device | str,
    quantization: Quantization,
) -> None:
    """Load the layers that stay in floats, then each of the others, and quantize it at once."""
    own: dict[nn.Module, list[tuple[_Target, Slice]]] = {x: [] for x in quantization.layers}
    others: list[tuple[_Target, Slice]] = []
    for target, source in sources:
        owner = target.owners[0][0]
        # A head that shares its weight with an embedding gets its own.
        is_own = owner in own and all(other is owner for other, _ in target.owners)
        (own[owner] if is_own else others).append((target, source))
    with raised_on_all(model):
        _load(others, device)
    for layer, parts in own.items():
        with raised_on_all(model):
            _load(parts, device)
            check_finite(layer)
        quantization.replace({layer: quantization.made_of(layer)})
        parts.clear()
        layer._parameters = {}  # Of floats, which the list of sources refers to.
    model.requires_grad_(False)


def _sources(model: nn.Module, folder: Path) -> list[tuple[_Target, Slice]]:
    """What is to be loaded, and from where; raises as :func:`load_pretrained`."""
    files = checkpoint_for(model, folder)
    keys = [(target, _key_of(target, files, model)) for target in _targets(model)]
    check_not_quantized(folder, files, [key for _, key in keys])
    problems = [target.problem(files[key]() if key else None) for target, key in keys]
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

    def problem(self, file: Any) -> str | None:
        """Why the value cannot be that of ``file``, a tensor in a file, if there is one."""
        name, tensor = self.names[0], self.tensor
        if file is None:
            return f"they lack {name!r}"
        full, shape = tuple(tensor.shape), tuple(file.get_shape())
        if self.shard is not None:
            layer, parameter = self.shard
            full = layer.full_shape(parameter)
        if shape != full:
            return f"{name!r} has the shape {full}, in the files {shape}"
        dtype = file.get_dtype()
        is_byte = dtype.startswith("F8") and tensor.element_size() == 1
        if tensor.is_floating_point() and dtype not in _FLOATS and not is_byte:
            return f"{name!r} has the dtype {tensor.dtype}, in the files {dtype} without a scale"
        return None

    def read(self, file: Any) -> Tensor:
        """This rank's part of a tensor in a file, perhaps a view of the mapped file."""
        if self.shard is None:
            whole: Tensor = file[...]
            return whole
        layer, name = self.shard
        return layer._part(name, file)

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


def _key_of(target: _Target, files: Mapping[str, Slice], model: nn.Module) -> str | None:
    base = f"{getattr(model, 'base_model_prefix', '')}."
    candidates = [
        key for name in target.names for key in (name, name.removeprefix(base), base + name)
    ]
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
