"""``python -m demo``: what pipekernels does, on real input, in under three minutes on two cores.

Trains a byte-level GPT on the standard library's sources, through a pipeline and unpiped; draws the
timeline of a training step; generates text in one process and split over two. Exits with 1 if the
losses with and without pipeline differ, or if the split model generates another text.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path
from statistics import mean

import torch

from demo.data import standard_library
from demo.generate import generate, generate_split
from demo.train import CHUNKS, STAGES, Settings, Trainer, stage_devices, train, write_losses
from pipekernels import Pipe, Timeline

RANKS = 2
PROMPT = b"import os\n\n\ndef open_file(path):\n    "
# Pipe sums the weight gradients of micro-batches in another order than one GEMM over the batch. The
# rounding differs in the 7th digit of the first losses, and training amplifies it. So the first
# steps must agree up to rounding, and the rest must reach about the same loss.
FIRST_STEPS = 20
FIRST_TOLERANCE = 1e-5  # of a loss of a few nats: about 20 units in the last place
RESULT_TOLERANCE = 0.01  # relative, of the mean loss over the last tenth of the steps


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=220, help="training steps")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds to train")
    parser.add_argument("--width", type=int, default=128, help="features of the model")
    parser.add_argument("--context", type=int, default=64, help="bytes the model sees")
    parser.add_argument("--length", type=int, default=300, help="bytes to generate")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for files")
    options = parser.parse_args(arguments)
    for name in ("steps", "seconds", "width", "context", "length"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")
    if options.width % Settings.heads:
        parser.error(f"--width must be a multiple of {Settings.heads} heads, got {options.width}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # Show progress in a pipe, too.
    started = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        steps=options.steps, seconds=options.seconds, width=options.width, context=options.context
    )
    corpus = standard_library()

    parameters = sum(p.numel() for p in settings.model().parameters())
    print(
        f"GPT with {settings.blocks} blocks and {parameters / 1e6:.2f} M parameters, trained on "
        f"{corpus.numel() / 1e6:.1f} MB of Python;\n"
        f"{STAGES} stages on {', '.join(stage_devices())}, {CHUNKS} chunks, "
        f"batches of {settings.batch} x {settings.context} bytes\n"
    )
    pipe, trainers, timelines = train(corpus, settings)
    piped, unpiped = trainers[:2]
    write_losses(options.output / "losses.csv", piped, unpiped)
    bubble = draw_timeline(timelines, options.output)
    same_text = compare_texts(pipe, settings, options.length, options.output)

    print("\n--- summary ---")
    checks = [*compare_losses(piped, unpiped), same_text]
    for trainer in trainers:
        ratio = trainer.tokens_per_second / unpiped.tokens_per_second
        print(f"{trainer.name:>30}: {trainer.tokens_per_second:8.0f} tokens/s  {ratio:.2f}x")
    print(bubble)
    for text, holds in checks:
        print(f"{'ok    ' if holds else 'FAILED'} {text}")
    print(f"files in {options.output}/: losses.csv, timeline.png, timeline.json, model.pt")
    print(f"{time.perf_counter() - started:.0f} seconds")
    return 0 if all(holds for _, holds in checks) else 1


def compare_losses(piped: Trainer, unpiped: Trainer) -> list[tuple[str, bool]]:
    """Compare the losses of the first steps, and the last; returns texts and whether they hold."""
    differences = [abs(a - b) for a, b in zip(piped.losses, unpiped.losses, strict=True)]
    first = differences[:FIRST_STEPS]
    last = max(1, len(differences) // 10)
    ours, theirs = mean(piped.losses[-last:]), mean(unpiped.losses[-last:])
    print(f"largest difference of the losses: {max(differences):.1e}")
    start = f"losses of the first {len(first)} steps differ by {max(first):.1e} at most"
    end = f"mean loss of the last {last} steps: piped {ours:.4f}, unpiped {theirs:.4f}"
    return [
        (f"{start} (limit {FIRST_TOLERANCE:.0e})", max(first) <= FIRST_TOLERANCE),
        (f"{end} (limit {RESULT_TOLERANCE:.0%})", abs(ours - theirs) <= RESULT_TOLERANCE * theirs),
    ]


def draw_timeline(timelines: list[Timeline], output: Path) -> str:
    """Write ``timeline.png`` and ``timeline.json`` for the training step with the median bubble."""
    timeline = sorted(timelines, key=lambda t: t.bubble)[len(timelines) // 2]
    timeline.save_png(output / "timeline.png")
    timeline.save_trace(output / "timeline.json")
    return f"bubble: {timeline.bubble:.1%} measured, {timeline.ideal_bubble:.1%} ideal"


def compare_texts(pipe: Pipe, settings: Settings, length: int, output: Path) -> tuple[str, bool]:
    """Generate in one process and split over two; whether the bytes are the same.

    In float64, so that the rounding of a sum over ranks does not change the choice of a byte.
    """
    model = pipe.to_sequential().cpu().double().eval()
    weights = output / "model.pt"
    torch.save(model.state_dict(), weights)
    torch.set_num_threads(1)
    start = time.perf_counter()
    whole = generate(model, PROMPT, length)
    seconds = time.perf_counter() - start
    split, split_seconds = generate_split(settings.model, weights, PROMPT, length, RANKS)
    for name, text, speed in (
        ("one process", whole, length / seconds),
        (f"split over {RANKS} processes", split[0], length / split_seconds),
    ):
        print(f"\n--- {name} ({speed:.0f} bytes/s) ---")
        print((PROMPT + text).decode(errors="replace"))
    same = all(text == whole for text in split)
    verdict = "the same" if same else "NOT the same"
    return f"{length} bytes generated split over {RANKS} processes are {verdict}", same


if __name__ == "__main__":
    sys.exit(main())
