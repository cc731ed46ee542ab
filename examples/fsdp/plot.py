"""Two panels in one SVG, without a plotting library: losses, and how far the resumed runs are from the run that went on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 860, 250, 70, 34, 62
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

Curve = tuple[str, str, dict[int, float], list[float]]
Place = Callable[[float], float]


def draw(losses: dict[int, float], deepspeed: dict[int, float], runs: Sequence[Curve], limit: float) -> str:
    """losses, deepspeed: the runs that went on. runs: (checkpoint, mesh, losses, differences) of those that were resumed."""
    steps = [*losses, *deepspeed]
    first, last = min(steps), max(steps)
    values = [*losses.values(), *deepspeed.values()]
    low, high = math.floor(min(values)), math.ceil(max(values))
    decades = [-8, *range(-7, -2)]

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 20)

    resumed = [step for _, _, own, _ in runs for step in own]

    def x_resumed(step: float) -> float:
        return LEFT + (step - min(resumed)) / (max(resumed) - min(resumed)) * (WIDTH - LEFT - 20)

    def y_loss(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * HEIGHT

    def y_difference(difference: float) -> float:
        at = math.log10(max(difference, 10.0 ** decades[0]))
        return TOP + HEIGHT + GAP + (decades[-1] - at) / (decades[-1] - decades[0]) * HEIGHT

    out = [text(LEFT, 20, "loss of the global batch: lines went on without a stop, rings were resumed", "start", bold=True)]
    out += frame(TOP, [(y_loss(v), str(v)) for v in range(low, high + 1)], [(x(s), str(s)) for s in ticks(first, last)])
    out += [line(losses, x, y_loss, "#222"), line(deepspeed, x, y_loss, "#999")]
    below = TOP + HEIGHT + GAP
    title = f"|difference| to the run that went on (log scale; none is drawn at 1e{decades[0]}); dashed: the limit of {limit:g}"
    out.append(text(LEFT, below - 12, title, "start", bold=True))
    columns = [(x_resumed(s), str(s)) for s in ticks(min(resumed), max(resumed))]
    out += frame(below, [(y_difference(10.0**d), f"1e{d}") for d in decades], columns)
    at = y_difference(limit)
    out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#c00" stroke-dasharray="6 4"/>')
    legend = below + HEIGHT + 46
    for i, (source, mesh, own, differences) in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        out += [f'<circle cx="{x(s):.1f}" cy="{y_loss(v):.1f}" r="{2 + i}" fill="none" stroke="{color}"/>' for s, v in own.items()]
        out.append(line(dict(zip(own, differences, strict=True)), x_resumed, y_difference, color))
        out.append(f'<rect x="{LEFT}" y="{legend + 18 * i - 9}" width="22" height="4" fill="{color}"/>')
        out.append(text(LEFT + 30, legend + 18 * i - 3, f"{source}: resumed on {mesh}", "start"))
    total = legend + 18 * len(runs) + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{total}" fill="#fff"/>', *out, "</svg>", ""])


def ticks(first: int, last: int) -> list[int]:
    """Round numbers between two steps."""
    width = 10 if last - first > 30 else 5 if last - first > 12 else 1
    return [s for s in range(0, last + 1, width) if s >= first]


def frame(top: float, rows: Iterable[tuple[float, str]], columns: Iterable[tuple[float, str]]) -> list[str]:
    """A panel with a grid and numbers at its left and below."""
    out = [f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 20}" height="{HEIGHT}" fill="none" stroke="#888"/>']
    for at, label in rows:
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        out.append(text(LEFT - 8, at + 4, label, "end"))
    return out + [text(at, top + HEIGHT + 16, label, "middle") for at, label in columns]


def line(points: dict[int, float], x: Place, y: Place, color: str) -> str:
    """A curve."""
    path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points.items())
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'


def text(x: float, y: float, words: str, anchor: str, bold: bool = False) -> str:
    """A label."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
