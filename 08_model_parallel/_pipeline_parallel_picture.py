"""Who did what when in pipeline_parallel.py: as letters in a terminal, and as a PNG."""

from pathlib import Path

from _pipeline_parallel_replay import Span

from old import report

MOST_COLUMNS = 100
COLORS = {
    "Forward": "tab:blue",
    "Backward": "tab:orange",
    "BackwardInput": "tab:orange",
    "BackwardWeight": "tab:green",
}


def letters(timelines: list[list[Span]]) -> list[str]:
    """A line for each rank, and in it a letter for each moment: what the rank computes in the middle of it."""
    step = max(timeline[-1].end for timeline in timelines)
    shortest = min(span.end - span.start for timeline in timelines for span in timeline)
    columns = min(round(step / shortest), MOST_COLUMNS)
    lines = []
    for rank, timeline in enumerate(timelines):
        line = ["."] * columns
        for span in timeline:
            for column in range(columns):
                if span.start <= (column + 0.5) * float(step) / columns < span.end:
                    line[column] = letter(span)
        lines.append(f"    rank {rank}  {''.join(line)}")
    return lines


def letter(span: Span) -> str:
    name, micro_batch, _ = span.instruction
    if name == "BackwardWeight":
        return "#"
    lower = chr(ord("a") + micro_batch % 26)
    return lower if name == "Forward" else lower.upper()


def plot(drawn: list[tuple[str, list[list[Span]]]], title: str, file: Path) -> bool:
    """The fastest step of each schedule, a bar per computation. False if there is no picture: without matplotlib."""
    plt = report.pyplot()
    if plt is None:
        return False
    ranks = len(drawn[0][1])
    figure, rows = plt.subplots(
        len(drawn), 1, figsize=(11, len(drawn) * (1 + 0.35 * ranks)), sharex=True, squeeze=False
    )
    for axes, (name, timelines) in zip(rows.flat, drawn, strict=True):
        for rank, timeline in enumerate(timelines):
            for span in timeline:
                computed, micro_batch, chunk = span.instruction
                start, width = 1e3 * span.start, 1e3 * (span.end - span.start)
                shade = 1.0 if chunk == 0 else 0.55  # a rank's second stage is paler
                axes.barh(
                    rank, width, left=start, color=COLORS[computed], alpha=shade, edgecolor="white", linewidth=0.5
                )
                axes.text(start + width / 2, rank, str(micro_batch), ha="center", va="center", fontsize=6)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
        axes.set_title(name, loc="left", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in ("Forward", "Backward", "BackwardWeight")]
    figure.legend(handles, ["forward", "backward", "weights' gradients alone"], loc="lower center", ncols=3)
    rows.flat[-1].set_xlabel("ms since the step began; the number is that of the micro-batch")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)
    return True
