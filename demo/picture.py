"""One picture of all acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from demo.collectives import OURS, AllReduces, size_name
from demo.generate import SPLIT, Generation
from demo.ranks import RANKS
from demo.results import Spread, rounded
from demo.train import PIPEKERNELS, Task, Training

ACTIONS = {"F": ("forward", "#9ecae1"), "B": ("backward", "#fdae6b")}
PEER, HIGHLIGHT = "#9a9a9a", "#2f6fab"


def draw(training: Training, generation: Generation, all_reduces: AllReduces, path: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 4, height_ratios=[2, 5], width_ratios=[3, 3, 3, 4])
    timeline = figure.add_subplot(grid[0, :])
    memory, speed, tokens, sizes = (figure.add_subplot(grid[1, column]) for column in range(4))
    _draw_timeline(timeline, training.tasks)
    memory.set(title="training: memory of a process", ylabel="MiB above a process without a model")
    _draw_bars(memory, {n: Spread(m, m, m) for n, m in training.memory.items()}, PIPEKERNELS)
    speed.set(title="training: speed", ylabel="tokens/s (line: p10 to p90)")
    _draw_bars(speed, training.speeds, PIPEKERNELS)
    tokens.set(title="Llama, generation: speed", ylabel="tokens/s (line: p10 to p90)")
    _draw_bars(tokens, generation.speeds, SPLIT)
    sizes.set(
        title="dist.all_reduce, 2 ranks",
        xlabel="size of the tensor",
        ylabel="µs (band: p10 to p90)",
    )
    _draw_sizes(sizes, all_reduces.microseconds)
    for axes in (memory, speed, tokens, sizes):
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_figure(path, dpi=100)


def _draw_timeline(axes: Axes, tasks: list[Task]) -> None:
    """Stages over time; a bar per microbatch with its number."""
    origin = min(task.begin for task in tasks)
    for task in tasks:
        left, width = (task.begin - origin) * 1e3, (task.end - task.begin) * 1e3
        colour = ACTIONS[task.kind][1]
        axes.barh(task.stage, width, 0.8, left, color=colour, edgecolor="white", linewidth=0.5)
        number: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
        axes.text(left + width / 2, task.stage, str(task.microbatch), **number)
    axes.set_facecolor("#eeeeee")
    axes.margins(x=0)
    axes.set_yticks(range(RANKS), [f"stage {stage}" for stage in range(RANKS)])
    axes.invert_yaxis()
    axes.set_xlabel("ms; numbers are microbatches")
    whole = RANKS * (max(task.end for task in tasks) - origin)
    idle = 1 - sum(task.end - task.begin for task in tasks) / whole
    axes.set_title(f"one step of two stages in two processes, 1F1B: idle {idle:.0%} of the time")
    handles = [Patch(color=colour, label=name) for name, colour in ACTIONS.values()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _draw_bars(axes: Axes, spreads: dict[str, Spread], ours: str) -> None:
    """A bar per name with its median and spread; ``ours`` stands out."""
    if not spreads:
        axes.text(0.5, 0.5, "left out", ha="center", transform=axes.transAxes)
    for name, spread in spreads.items():
        label = name.replace(", ", ",\n")
        axes.bar(label, spread.median, 0.6, color=HIGHLIGHT if name == ours else PEER)
        axes.vlines(label, spread.p10, spread.p90, color="black")
        place: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
        axes.annotate(rounded(spread.median), (label, 0), color="white", **place)
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.15, y=0.1)


def _draw_sizes(axes: Axes, microseconds: dict[str, dict[int, Spread]]) -> None:
    """Time over size, a line per backend."""
    for backend, by_size in microseconds.items():
        colour = HIGHLIGHT if backend == OURS else PEER
        sizes, spreads = list(by_size), list(by_size.values())
        axes.plot(sizes, [s.median for s in spreads], ".-", color=colour, label=backend)
        low, high = [s.p10 for s in spreads], [s.p90 for s in spreads]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(size_name, sizes), rotation=45)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
