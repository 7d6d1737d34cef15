"""Every family of transformers that a small configuration can make, sharded by "auto" on two ranks.

``cd tests; python -m support.sweeps.families`` compares outputs, gradients and greedy tokens with
those of one process, and writes docs/families.md. Arguments: names of families to look at instead;
the page keeps what it says of the others.
"""

import collections
import contextlib
import copy
import re
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
from pipekernels.huggingface.small_models import small_model
from support.checks import full_gradients
from support.ranks import run_threads

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
# Why a family is refused, on the page, by a part of the message or of what the page says.
NO_PLAN = "no plan is carried, and there is none here"
UNSUPPORTED = "kinds that are not supported"
REASONS = {
    "carries no plan": NO_PLAN,
    NO_PLAN: NO_PLAN,
    UNSUPPORTED: f"the carried plan has experts or other {UNSUPPORTED}",
    "ranks cannot share": "there are fewer heads than ranks",
}
RANKS = 2
SECONDS = 60  # For one family.
HEADS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL",
)


class Finding(NamedTuple):
    """What has come of a family."""

    family: str
    state: str
    """``equal``, ``differs``, ``refused``, ``fails`` or ``not made``."""
    note: str = ""


def model_of(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model and its inputs; raises whatever keeps one from being made."""
    for head in HEADS:
        names = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(family)
        if names is not None:
            name = names[0] if isinstance(names, (tuple, list)) else names
            kind = getattr(transformers, name)
            # Of its text alone, where the family's is of images too.
            config = kind.config_class or getattr(transformers, CONFIG_MAPPING_NAMES[family])
            return small_model(kind, config())
    raise ValueError("no model")


def outputs_of(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The outputs of a forward, with a backward after it."""
    output = model(**inputs)
    values = [v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point()]
    # Weighted: the squares of normalised features have a constant sum, and no gradients.
    flat = [value.flatten() for value in values if value.requires_grad]
    sum((value.square() * torch.arange(len(value)).cos()).mean() for value in flat).backward()
    return [value.detach() for value in values]


def tokens_of(model: Any, inputs: dict[str, Tensor]) -> Tensor | None:
    if "input_ids" not in inputs or "decoder_input_ids" in inputs or not model.can_generate():
        return None
    return model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)


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


def compare(plain: nn.Module, inputs: dict[str, Tensor]) -> Finding:
    """How the model of two ranks differs, if it does; the name of the family is left open."""
    copies = [copy.deepcopy(plain) for _ in range(RANKS)]
    tokens = tokens_of(copy.deepcopy(plain), inputs)
    expected = outputs_of(plain, inputs)
    gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    whole = sum(p.numel() for p in plain.parameters())

    def body(comm: Communicator) -> Finding:
        model = copies[comm.rank]
        tensor_parallelize(model, "auto", comm)
        share = sum(p.numel() for p in model.parameters()) / whole
        found = outputs_of(model, inputs)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a.shape != b.shape or not error_of(a, b) < 1e-5:
                return Finding("", "differs", f"output {i}")
        full = full_gradients(model)
        for key, gradient in gradients.items():
            # Biases of keys have none but rounding errors.
            bound = 1e-4 * max(gradient.abs().max().item(), 1e-3 * largest)
            is_close = full[key].shape == gradient.shape
            if not is_close or not (full[key] - gradient).abs().max() <= bound:
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
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def look_at(family: str) -> Finding:
    """Never raises."""
    with warnings.catch_warnings(), limited():
        warnings.simplefilter("ignore")
        try:
            plain, inputs = model_of(family)
            refusal = run_threads(RANKS, partial(refused, copy.deepcopy(plain)))[0]
            if refusal is not None:
                return Finding(family, "refused", refusal)
            outputs_of(copy.deepcopy(plain), inputs)
        except Exception as error:  # noqa: BLE001
            return Finding(family, "not made", f"{type(error).__name__}: {error}")
        try:
            finding = compare(plain, inputs)
        except Exception as error:  # noqa: BLE001
            return Finding(family, "fails", f"{type(error).__name__}: {error}")
    return finding._replace(family=family)


def page(findings: list[Finding]) -> str:
    """The table of the documentation."""
    counts = collections.Counter(finding.state for finding in findings)
    equal = [f"{f.family} ({f.note})" for f in findings if f.state == "equal"]
    refused: dict[str, list[str]] = {}
    for finding in findings:
        if finding.state == "refused":
            note = finding.note
            known = (why for part, why in REASONS.items() if part in note)
            why = next(known, note.partition(";")[0][:160])
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


def on_page(text: str) -> list[Finding]:
    """What a page says of each family."""
    _, _, body = text.partition("## Sharded")
    sharded, _, refused = body.partition("## Refused")
    found = [Finding(*m, "equal", n) for *m, n in re.findall(r"([\w.-]+) \((\d\.\d\d)\)", sharded)]
    refused, _, wrong = refused.partition("## Wrong")
    found += [Finding(*m) for m in re.findall(r"\* ([\w.-]+): (\w+), (.*)", wrong)]
    for line in refused.strip().splitlines():
        why, _, listed = line.removeprefix("* ").rpartition(": ")
        found += [Finding(name, "refused", why) for name in listed.rstrip(".").split(", ")]
    rest = sorted(set(names()) - {finding.family for finding in found})
    return found + [Finding(name, "not made") for name in rest]


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
    others = [finding for finding in on_page(PAGE.read_text()) if finding.family not in chosen]
    PAGE.write_text(page(sorted(findings + others if chosen else findings)))
    print(collections.Counter(finding.state for finding in findings))
    sys.exit(any(finding.state in ("differs", "fails") for finding in findings))


if __name__ == "__main__":
    main(sys.argv[1:])
