"""The picture of the harvest: what each policy gives batch and costs users, and one minute of the tide. Plain SVG, no library."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 980, 660
LEFT, RIGHT, TOP = 70, 950, 60
PLOT_HEIGHT = 250
LINE_TOP = 400
LINE_HEIGHT = 220
SLOWER_BASE, SLOWER_MIN, SLOWER_MAX = 0.8, 0.95, 400.0
SECONDS = 120.0

STYLE = """
    .ink { fill: #1b2733; } .soft { fill: #5b6b7a; } .axis { stroke: #5b6b7a; stroke-width: 1; fill: none; }
    .grid { stroke: #5b6b7a; stroke-width: 0.5; opacity: 0.25; } .held { fill: #e3f1ea; }
    .tide { fill: #2f8063; } .other { fill: #2f6f9f; } .broken { fill: none; stroke: #b4532a; stroke-width: 1.6; }
    .users { fill: #b4532a; opacity: 0.75; } .batch { fill: none; stroke: #2f8063; stroke-width: 1.4; }
    text { font-size: 12px; } .head { font-size: 16px; font-weight: 600; } .name { font-size: 11px; }
    @media (prefers-color-scheme: dark) {
      .ink { fill: #e6edf3; } .soft { fill: #9fb0c0; } .axis, .grid { stroke: #9fb0c0; } .held { fill: #14302a; }
      .tide { fill: #6cc5a1; } .other { fill: #6fb1de; } .batch { stroke: #6cc5a1; }
    }"""


@dataclass(frozen=True)
class DrawnRun:
    """One policy as the picture shows it. `line` has the interactive and the batch calls in flight at each moment."""

    name: str
    batch_rate: float
    first_p99_ms: float
    between_mean_ms: float
    line: Sequence[tuple[float, int, int]]


def draw(path: Path, listed: Sequence[DrawnRun], all_batch_rate: float) -> None:
    """Write the picture of one trace. The first of the runs is interactive traffic alone, the second the tide."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="title about" font-family="system-ui, -apple-system, \'Segoe UI\', sans-serif">',
        '<title id="title">The harvest</title>',
        '<desc id="about">Above: batch rate against the slowdown of interactive time to first token, for every policy. '
        "Below: interactive and batch calls in flight over time under the tide.</desc>",
        f"<style>{STYLE}\n  </style>",
        *_policies(listed, all_batch_rate),
        *_time_line(listed[1]),
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")


def _across(slower: float) -> float:
    # Logarithmic in what lies above, so that the bound of 1.1 has room: that is where the policies differ.
    above, least, most = (
        math.log(one - SLOWER_BASE) for one in (min(max(slower, SLOWER_MIN), SLOWER_MAX), SLOWER_MIN, SLOWER_MAX)
    )
    share = (above - least) / (most - least)
    return LEFT + share * (RIGHT - LEFT)


def _policies(listed: Sequence[DrawnRun], all_batch_rate: float) -> Iterator[str]:
    alone = listed[0]
    bottom = TOP + PLOT_HEIGHT
    yield f'<text x="{LEFT}" y="24" class="head ink">Batch rate, and what users feel of it (bursty arrivals)</text>'
    yield (
        f'<text x="{LEFT}" y="44" class="soft">share of the all-batch rate; filled: both bounds hold, '
        "ring: time to first token or between tokens is more than 10 % above alone</text>"
    )
    held = _across(1.1)
    yield f'<rect x="{LEFT}" y="{TOP}" width="{held - LEFT:.1f}" height="{PLOT_HEIGHT}" class="held"/>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        height = bottom - share * PLOT_HEIGHT
        yield f'<path d="M{LEFT},{height:.1f} H{RIGHT}" class="grid"/>'
        yield f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end" class="soft">{share:.2f}</text>'
    for mark in (1, 1.1, 1.5, 2, 5, 10, 20, 50, 100, 200):
        place = _across(mark)
        yield f'<path d="M{place:.1f},{bottom} v5" class="axis"/>'
        yield f'<text x="{place:.1f}" y="{bottom + 18}" text-anchor="middle" class="soft">{mark}</text>'
    yield f'<path d="M{LEFT},{TOP} V{bottom} H{RIGHT}" class="axis"/>'
    yield (
        f'<text x="{(LEFT + RIGHT) / 2}" y="{bottom + 36}" text-anchor="middle" class="soft">'
        "interactive p99 time to first token, times that of running alone</text>"
    )
    names: list[tuple[float, float, float]] = []
    for one in listed[1:]:
        slower = one.first_p99_ms / alone.first_p99_ms
        fits = slower <= 1.1 and one.between_mean_ms <= 1.1 * alone.between_mean_ms
        kind = ("tide" if one.name.startswith("tide") else "other") if fits else "broken"
        place, height = _across(slower), bottom - one.batch_rate / all_batch_rate * PLOT_HEIGHT
        yield f'<circle cx="{place:.1f}" cy="{height:.1f}" r="5" class="{kind}"><title>{escape(one.name)}</title></circle>'
        if one.name.startswith("tide,"):
            continue
        # A name that would lie on another moves up until it does not.
        end = place + 9 + 6.5 * len(one.name)
        while any(place < x_end and x < end and abs(height - y) < 11 for x, x_end, y in names):
            height -= 3
        names.append((place, end, height))
        yield f'<text x="{place + 9:.1f}" y="{height + 4:.1f}" class="name ink">{escape(one.name)}</text>'


def _time_line(tide: DrawnRun) -> Iterator[str]:
    line = [point for point in tide.line if point[0] <= SECONDS * 1000]
    bottom = LINE_TOP + LINE_HEIGHT
    most = 20 * math.ceil(max(max(point[1:]) for point in line) / 20)

    def across(now_ms: float) -> float:
        return LEFT + now_ms / (SECONDS * 1000) * (RIGHT - LEFT)

    def up(calls: float) -> float:
        return bottom - calls / most * LINE_HEIGHT

    yield f'<text x="{LEFT}" y="{LINE_TOP - 24}" class="head ink">The tide: calls in flight over two minutes</text>'
    yield f'<rect x="{LEFT + 430}" y="{LINE_TOP - 35}" width="12" height="12" class="users"/>'
    yield f'<text x="{LEFT + 448}" y="{LINE_TOP - 25}" class="soft">interactive</text>'
    yield f'<path d="M{LEFT + 540},{LINE_TOP - 29} h16" class="batch"/>'
    yield f'<text x="{LEFT + 562}" y="{LINE_TOP - 25}" class="soft">batch</text>'
    for calls in range(0, most + 1, max(20, most // 4 // 20 * 20)):
        yield f'<path d="M{LEFT},{up(calls):.1f} H{RIGHT}" class="grid"/>'
        yield f'<text x="{LEFT - 8}" y="{up(calls) + 4:.1f}" text-anchor="end" class="soft">{calls}</text>'
    for second in range(0, int(SECONDS) + 1, 20):
        yield f'<text x="{across(second * 1000):.1f}" y="{bottom + 18}" text-anchor="middle" class="soft">{second} s</text>'
    users = " ".join(f"L{across(at):.1f},{up(calls):.1f}" for at, calls, _ in line)
    batch = " ".join(f"L{across(at):.1f},{up(calls):.1f}" for at, _, calls in line)
    yield f'<path d="M{LEFT},{bottom} {users} L{across(line[-1][0]):.1f},{bottom} z" class="users"/>'
    yield f'<path d="M{LEFT},{bottom} {batch}" class="batch"/>'
    yield f'<path d="M{LEFT},{LINE_TOP} V{bottom} H{RIGHT}" class="axis"/>'
