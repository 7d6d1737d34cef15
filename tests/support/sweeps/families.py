"""Every family of transformers that a small configuration can make, sharded by "auto" on two ranks.

``cd tests; python -m support.sweeps.families`` compares outputs, gradients and greedy tokens with
those of one process, and writes docs/families.md. Arguments: names of families to look at instead.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import signal
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import full_state_dict
from support.ranks import run_threads

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
RANKS = 2
SECONDS = 60  # For one family.
MOST = 20_000_000  # Parameters.
HEADS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL",
)

WIDTH, INNER, LAYERS, QUERIES, KEYS, VOCABULARY, LENGTH = 32, 48, 2, 4, 2, 61, 64
SIZES: list[tuple[int, tuple[str, ...]]] = [
    (
        WIDTH,
        (
            *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "d_embed"),
            *("word_embed_proj_dim", "projection_dim", "attention_hidden_size", "lru_width"),
            *("conv_dim", "cross_attention_hidden_size", "emb_dim", "model_dim"),
        ),
    ),
    (
        INNER,
        (
            *("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "encoder_ffn_dim"),
            *("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *("ffn_hidden_size", "shared_intermediate_size", "inner_dim", "mlp_dim"),
        ),
    ),
    (
        LAYERS,
        (
            *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
            *("decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_local_experts_"),
        ),
    ),
    (
        QUERIES,
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
            *("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"),
            *("moe_num_experts",),
        ),
    ),
    (
        KEYS,
        ("num_key_value_heads", "num_experts_per_tok", "num_kv_heads", "moe_k", "top_k_experts"),
    ),
    (VOCABULARY, ("vocab_size", "vocab_size_per_layer_input")),
    (8, ("head_dim", "d_kv", "rotary_dim", "hidden_size_per_layer_input", "laurel_rank")),
    (
        LENGTH,
        (
            *("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"),
            *("max_target_positions", "max_seq_len"),
        ),
    ),
    (16, ("image_size",)),
    (4, ("patch_size", "num_mel_bins")),
    (1, ("bos_token_id", "decoder_start_token_id")),
    (0, ("pad_token_id",)),
]
FIELDS = {field: value for value, fields in SIZES for field in fields}


class Finding(NamedTuple):
    """What has come of a family."""

    family: str
    state: str
    """``equal``, ``differs``, ``refused``, ``fails`` or ``not made``."""
    note: str = ""


def small(kind: Any) -> Any:
    """A configuration of class ``kind`` with small sizes."""
    default = kind()
    fields: dict[str, Any] = {}
    for name, value in FIELDS.items():
        with contextlib.suppress(Exception):  # Of attributes that differ between layers.
            if type(getattr(default, name, None)) is int:
                fields[name] = value
    if "num_key_value_heads" not in fields and hasattr(default, "num_key_value_heads"):
        fields["num_key_value_heads"] = KEYS
    for name in ("layer_types", "mlp_layer_types", "intermediate_size"):
        entries = getattr(default, name, None)
        if isinstance(entries, (list, tuple)) and entries:
            distinct = list(dict.fromkeys(entries))
            fields[name] = [INNER] * LAYERS if name == "intermediate_size" else distinct[:LAYERS]
            fields[name] = (fields[name] * LAYERS)[:LAYERS]
    for name in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in (getattr(default, name, None) or {}):
            fields[name] = {**getattr(default, name), "mrope_section": [2, 1, 1]}
    for name in getattr(kind, "sub_configs", {}):
        inner = getattr(default, name, None)
        if isinstance(inner, transformers.PreTrainedConfig):
            fields[name] = small(type(inner)).to_dict()
    if hasattr(default, "eos_token_id"):
        fields["eos_token_id"] = 2
    for left in (None, *fields):  # Some fields have no setter, or not these values.
        with contextlib.suppress(Exception):
            return kind(**{name: value for name, value in fields.items() if name != left})
    return kind(**fields)


def model_of(family: str) -> nn.Module:
    """A small model in float64; raises whatever keeps one from being made."""
    config = small(getattr(transformers, CONFIG_MAPPING_NAMES[family]))
    for head in HEADS:
        names = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(family)
        if names is None:
            continue
        kind = getattr(transformers, names[0] if isinstance(names, (tuple, list)) else names)
        with torch.device("meta"):
            count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if count > MOST:
            raise ValueError(f"{count:,} parameters in the small configuration")
        torch.manual_seed(0)
        model: nn.Module = kind(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * 0.05
        return model
    raise ValueError("no model for text or images")


def inputs_for(model: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    name = model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    if name == "pixel_values":
        config = model.config
        size = getattr(config, "image_size", 16)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return {name: torch.randn(2, channels, height, width, dtype=torch.float64)}
    if name != "input_ids":
        raise ValueError(f"its main input is {name}")
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 7))}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 5))
    return inputs


def outputs_of(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The outputs of a forward, with a backward after it."""
    output = model(**inputs)
    values = [v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point()]
    sum(value.square().mean() for value in values if value.requires_grad).backward()
    return [value.detach() for value in values]


def tokens_of(model: Any, inputs: dict[str, Tensor]) -> Tensor | None:
    if "input_ids" not in inputs or "decoder_input_ids" in inputs or not model.can_generate():
        return None
    found: Tensor = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    return found


def error_of(found: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max().clamp_min(1e-9).item() if expected.numel() else 1.0
    return (found - expected).abs().max().item() / largest if expected.numel() else 0.0


def refused(plain: nn.Module, comm: Communicator) -> str | None:
    """Why the model is refused, if it is."""
    try:
        tensor_parallelize(copy.deepcopy(plain), "auto", comm)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def compare(plain: nn.Module) -> Finding | None:
    """How the model of two ranks differs, if it does; the name of the family is left open."""
    inputs = inputs_for(plain)
    copies = [copy.deepcopy(plain) for _ in range(RANKS)]
    tokens = tokens_of(copy.deepcopy(plain), inputs)
    expected = outputs_of(plain, inputs)
    gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    whole = sum(p.numel() for p in plain.parameters())

    def body(comm: Communicator) -> Finding:
        model = copies[comm.rank]
        tensor_parallelize(model, "auto", comm)
        share = sum(p.numel() for p in model.parameters()) / whole
        found = outputs_of(model, inputs)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a.shape != b.shape or not error_of(a, b) < 1e-5:
                return Finding("", "differs", f"output {i}")
        for parameter in model.parameters():  # So that the full state is that of gradients.
            grad = parameter.grad
            parameter.data = torch.zeros_like(parameter) if grad is None else grad
        full = full_state_dict(model)
        for key, gradient in gradients.items():
            if full[key].shape != gradient.shape or not error_of(full[key], gradient) < 1e-4:
                return Finding("", "differs", f"gradient of {key}")
        return Finding("", "equal", f"{share:.2f}")

    def generating(comm: Communicator) -> bool:
        model = tensor_parallelize(again[comm.rank], "auto", comm)
        found = tokens_of(model, inputs)
        assert found is not None and tokens is not None
        return found.equal(tokens)

    again = [copy.deepcopy(model) for model in copies]
    finding: Finding = run_threads(RANKS, body)[0]
    if finding.state == "equal" and tokens is not None and not all(run_threads(RANKS, generating)):
        return finding._replace(state="differs", note="greedy tokens")
    return finding


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def look_at(family: str) -> Finding:
    """Never raises."""
    with warnings.catch_warnings(), limited(SECONDS):
        warnings.simplefilter("ignore")
        try:
            plain = model_of(family)
            refusal = run_threads(RANKS, partial(refused, copy.deepcopy(plain)))[0]
            if refusal is not None:
                return Finding(family, "refused", refusal)
            outputs_of(copy.deepcopy(plain), inputs_for(plain))
        except Exception as error:  # noqa: BLE001
            return Finding(family, "not made", f"{type(error).__name__}: {error}")
        try:
            finding = compare(plain)
        except Exception as error:  # noqa: BLE001
            return Finding(family, "fails", f"{type(error).__name__}: {error}")
    assert finding is not None
    return finding._replace(family=family)


def page(findings: list[Finding]) -> str:
    """The table of the documentation."""
    counts = collections.Counter(finding.state for finding in findings)
    equal = [f"{f.family} ({f.note})" for f in findings if f.state == "equal"]
    refused: dict[str, list[str]] = {}
    for finding in findings:
        if finding.state == "refused":
            note = finding.note
            why = (
                "no plan is carried, and there is none here"
                if "carries no plan" in note
                else "the carried plan has experts or other kinds that are not supported"
                if "kinds that are not supported" in note
                else "heads that two ranks cannot share evenly"
                if "share evenly" in note
                else note.partition(";")[0][:160]
            )
            refused.setdefault(why, []).append(finding.family)
    lines = [
        "# Families of transformers",
        "",
        f'What `tensor_parallelize(model, "auto", comm)` does on {RANKS} ranks with a small model',
        f"of each family of transformers {transformers.__version__}: {counts['equal']} are",
        "sharded, and outputs, all gradients and greedy tokens equal those of one process;",
        f"{counts['refused']} are refused before anything is changed; of {counts['not made']} no",
        "small model for text or images could be made by this page's program",
        "(`cd tests; python -m support.sweeps.families`).",
        "",
        "## Sharded, with the share of parameters on a rank",
        "",
        ", ".join(equal) + ".",
        "",
        "## Refused",
        "",
        *[f"* {why}: {', '.join(names)}." for why, names in sorted(refused.items())],
        "",
    ]
    wrong = [f for f in findings if f.state in ("differs", "fails")]
    if wrong:
        lines += ["## Wrong", "", *[f"* {f.family}: {f.state}, {f.note[:200]}" for f in wrong], ""]
    return "\n".join(lines)


def names() -> list[str]:
    """The families that have a model for text or images."""
    known = set().union(*(getattr(modeling_auto, f"{head}_MAPPING_NAMES") for head in HEADS))
    return sorted(known & CONFIG_MAPPING_NAMES.keys())


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    findings = []
    for family in chosen or names():
        findings.append(look_at(family))
        print(*findings[-1], sep=" | ", flush=True)
    if not chosen:
        PAGE.write_text(page(findings))
    print(collections.Counter(finding.state for finding in findings))
    sys.exit(any(finding.state in ("differs", "fails") for finding in findings))


if __name__ == "__main__":
    main(sys.argv[1:])
