"""What weights of integers change: log-probabilities of a trained GPT, beside the same
model in float32.

The GPT of 4 blocks of width 128 trains on sources of Python's standard library, and predicts bytes
of sources that it has not seen. The linear layers of its blocks get other weights:

* ``int8``, ``int4``: by ``quantize_weights``, with the kernels of this package, which round the
  layers' inputs to 8 bits.
* ``q8_0``, ``q4_0``: llama.cpp's formats, by the functions of the package ``gguf``, and its
  rounding of the layers' inputs to q8_0; products in float32.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Options, Plan, Row
from bench.report.tables import markdown
from demo.data import batches, standard_library
from demo.model import new_model, token_loss
from demo.sizes import FULL
from demo.text import PLAN
from demo.train import LEARNING_RATE

SIZES = dataclasses.replace(FULL, width=128)
STEPS, QUICK_STEPS = 1000, 20
OURS = {
    "int8, a scale per output feature": (8, None),
    "int8, groups of 32": (8, 32),
    "int4, groups of 32": (4, 32),
    "int4, groups of 128": (4, 128),
}
CASE = "a trained GPT"
CANDIDATES = {CASE: ("float32", *OURS, "llama.cpp, q8_0", "llama.cpp, q4_0")}
QUICK = CANDIDATES
BASE = "float32"
CONDITIONS = {
    "training": f"{STEPS} steps of {SIZES.batch} x {SIZES.context} bytes, AdamW",
    "loss": "mean over 65536 bytes of sources that were not trained on, in nats",
    "change": "of the log-probability of each byte, its absolute value, mean and 99th percentile",
}


def measure(plan: Plan, options: Options) -> Iterator[list[Row]]:
    """A row per format."""
    corpus = standard_library()
    known, unseen = corpus.split([corpus.numel() * 9 // 10, -(-corpus.numel() // 10)])
    model = new_model(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    steps = QUICK_STEPS if options.quick else STEPS
    for x, y in batches(known, steps, SIZES.batch, SIZES.context, seed=0):
        optimizer.zero_grad()
        token_loss(model(x), y).backward()
        optimizer.step()
    text = next(batches(unseen, 1, 65536 // SIZES.context, SIZES.context, seed=1))
    base = _probabilities(model, *text)
    for case, names in plan.items():
        rows = []
        for name in names:
            if name.startswith("llama.cpp") and importlib.util.find_spec("gguf") is None:
                print("gguf is not installed: llama.cpp's formats are left out")
                continue
            found = _probabilities(_with_weights(copy.deepcopy(model), name), *text)
            change = (found - base).abs()
            figures = {"loss": -found.mean(), "mean": change.mean(), "p99": change.quantile(0.99)}
            told = {key: figure.item() for key, figure in figures.items()}
            rows.append({"case": case, "candidate": name, **told})
        yield rows


@torch.no_grad()
def _probabilities(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The logarithms of the probabilities of the bytes ``y``: float64 ``[bytes]``."""
    logits = torch.cat([model(part) for part in x.split(64)]).double()
    return logits.log_softmax(-1).gather(-1, y[..., None]).flatten()


def _with_weights(model: nn.Sequential, name: str) -> nn.Module:
    """``model``, with the weights of a candidate."""
    from pipekernels import Communicator
    from pipekernels.tensor_parallel import quantize_weights, tensor_parallelize

    if name in OURS:
        (comm,) = Communicator.threads(1)
        bits, group = OURS[name]
        return quantize_weights(tensor_parallelize(model, PLAN, comm), bits=bits, group_size=group)
    if name != BASE:
        for layer in model[1:-1].modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = _rounded(layer.weight.data, name[-4:])
                layer.register_forward_pre_hook(lambda _, args: _rounded(args[0], "q8_0"))
    return model


def _rounded(x: Tensor, kind: str) -> Tensor:
    """``x`` in llama.cpp's format ``kind``, and back."""
    from gguf import GGMLQuantizationType, quants

    of = GGMLQuantizationType[kind.upper()]
    return torch.from_numpy(quants.dequantize(quants.quantize(x.numpy(), of), of))


def table(rows: list[dict[str, Any]], others: Sequence[list[dict[str, Any]]] = ()) -> str:
    """A row per format."""
    header = ["weights", "loss", "mean change", "99th percentile"]
    return markdown(
        header,
        [
            [row["candidate"], *(f"{row[key]:.4f}" for key in ("loss", "mean", "p99"))]
            for row in rows
        ],
    )
