"""Every family of transformers that a small configuration can make, sharded by "auto" on two ranks.

``cd tests; python -m support.sweeps.families`` compares outputs, gradients and greedy tokens with
those of one process, computes which share of the parameters a rank holds at the sizes of the
default configuration, and writes docs/families.md. Arguments: names of families to look at instead;
the page keeps what it says of the others. With ``--shares`` it computes shares only, by default of
all families that the page says are equal.
"""

import collections
import contextlib
import copy
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pipekernels import Communicator, tensor_parallelize
from pipekernels.huggingface.derive.small_models import running_inputs, small_model
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
SECONDS = 200  # For the comparison of one family.
SECONDS_OF_SHARE = 600
MOST = 0.60
"""Of the parameters: what a rank holds of a family that counts as sharded."""
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
    """If equal, the share of a rank, or why the default configuration has none."""


def class_of(family: str) -> tuple[Any, Any]:
    """The class of its models and the default configuration."""
    for head in HEADS:
        names = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(family)
        if names is not None:
            name = names[0] if isinstance(names, (tuple, list)) else names
            kind = getattr(transformers, name)
            # Of its text alone, where the family's is of images too.
            config = kind.config_class or getattr(transformers, CONFIG_MAPPING_NAMES[family])
            return kind, config()
    raise ValueError("no model")


def share_held(model: nn.Module, comm: Communicator) -> float:
    """Shard ``model``, perhaps on the meta device; the share of its parameters that this rank then
    holds. Embeddings count for nothing, nor do heads that are tied to them."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedded = {module.weight for module in embeddings}
    full = {name: p.numel() for name, p in model.named_parameters() if p not in embedded}
    held = dict(tensor_parallelize(model, "auto", comm).named_parameters())
    return sum(held[name].numel() for name in full) / sum(full.values())


def share_of(family: str) -> str:
    """The share of a rank at the sizes of the default configuration, or why there is none."""
    with warnings.catch_warnings(), limited(SECONDS_OF_SHARE):
        warnings.simplefilter("ignore")
        kind, config = class_of(family)
        try:
            with torch.device("meta"):
                models = [kind(config) for _ in range(RANKS)]
        except Exception:  # noqa: BLE001 - whatever the model raises where a size is None
            return "the default configuration makes no model"
        try:
            run = partial(run_threads, RANKS, timeout=SECONDS_OF_SHARE)
            share = run(lambda comm: share_held(models[comm.rank], comm))[0]
        except Exception as error:  # noqa: BLE001
            return str(error)
    return f"{share:.2f}" if share < 1 else "nothing but embeddings is sharded"


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

    def body(comm: Communicator) -> Finding:
        model = copies[comm.rank]
        tensor_parallelize(model, "auto", comm)
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
        return Finding("", "equal")

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
    """The share is left open. Never raises."""
    with warnings.catch_warnings(), limited(SECONDS):
        warnings.simplefilter("ignore")
        try:
            plain = small_model(*class_of(family))
            inputs = running_inputs(plain)
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


def is_share(note: str) -> bool:
    return re.fullmatch(r"\d\.\d\d", note) is not None


def by_reason(findings: Iterable[Finding]) -> list[str]:
    """Lines of families that have no share for the same reason."""
    families: dict[str, list[str]] = {}
    for finding in findings:
        note = finding.note
        known = (why for part, why in REASONS.items() if part in note)
        why = next(known, note.partition(";")[0][:160])
        families.setdefault(why, []).append(finding.family)
    return [f"* {why}: {', '.join(names)}." for why, names in sorted(families.items())]


def page(findings: list[Finding]) -> str:
    """The table of the documentation."""
    of = collections.defaultdict(list)
    for finding in findings:
        of[finding.state].append(finding)
    shares = [finding for finding in of["equal"] if is_share(finding.note)]
    small = [finding for finding in of["equal"] if not is_share(finding.note)]
    listed = [f"{family} ({note})" for family, _, note in shares if float(note) <= MOST]
    partly = [f"{family} ({note})" for family, _, note in shares if float(note) > MOST]
    lines = [
        "# Families of transformers",
        "",
        f'What `tensor_parallelize(model, "auto", comm)` does on {RANKS} ranks with each family',
        f"of transformers {transformers.__version__}: {len(listed)} are sharded; {len(partly)} are",
        f"partly sharded: a rank holds more than {MOST:.2f} of the parameters; of {len(small)}",
        "a small model is sharded, but none of the default configuration is known to be;",
        f"{len(of['refused'])} are refused before anything is changed; of {len(of['not made'])} no",
        "small model for text or images could be made.",
        "",
        "Outputs, all gradients and greedy tokens of a small sharded model of each equal those of",
        "one process (`cd tests; python -m support.sweeps.families`). In brackets, rounded, is the",
        "share of the parameters that a rank holds at the sizes of the default configuration,",
        "without embeddings and heads that are tied to them. It is computed on the meta device,",
        "with `--shares` without comparing anything.",
        "",
        "## Sharded",
        "",
        ", ".join(listed) + ".",
        "",
        "## Partly sharded",
        "",
        ", ".join(partly) + ".",
        "",
        "## Small models only",
        "",
        *by_reason(small),
        "",
        "## Refused",
        "",
        *by_reason(of["refused"]),
        "",
    ]
    if wrong := of["differs"] + of["fails"]:
        lines += ["## Wrong", "", *[f"* {f.family}: {f.state}, {f.note[:200]}" for f in wrong], ""]
    return "\n".join(lines)


def on_page(text: str) -> list[Finding]:
    """What a page says of each family."""
    _, _, body = text.partition("## Sharded")
    shares, _, body = body.partition("## Small models only")
    small, _, body = body.partition("## Refused")
    refused, _, wrong = body.partition("## Wrong")
    found = [Finding(m, "equal", n) for m, n in re.findall(r"([\w.-]+) \((\d\.\d\d)\)", shares)]
    found += [Finding(*m) for m in re.findall(r"\* ([\w.-]+): (\w+), (.*)", wrong)]
    for state, section in (("equal", small), ("refused", refused)):
        for line in section.strip().splitlines():
            why, _, listed = line.removeprefix("* ").rpartition(": ")
            found += [Finding(name, state, why) for name in listed.rstrip(".").split(", ")]
    rest = sorted(set(names()) - {finding.family for finding in found})
    return found + [Finding(name, "not made") for name in rest]


def names() -> list[str]:
    """The families that have a model for text or images."""
    known = set().union(*(getattr(modeling_auto, f"{head}_MAPPING_NAMES") for head in HEADS))
    return sorted(known & CONFIG_MAPPING_NAMES.keys())


def main(chosen: list[str], shares_only: bool) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    known = {finding.family: finding for finding in on_page(PAGE.read_text())}
    every = names()
    families = chosen or [name for name in every if not shares_only or known[name].state == "equal"]
    for family in families:
        finding = known[family] if shares_only else look_at(family)
        if finding.state == "equal":
            finding = finding._replace(note=share_of(family))
        print(*finding, sep=" | ", flush=True)
        known[family] = finding
        PAGE.write_text(page([known[name] for name in every]))
    states = collections.Counter(known[family].state for family in families)
    print(states)
    sys.exit(bool(states["differs"] + states["fails"]))


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--shares"], "--shares" in sys.argv)
