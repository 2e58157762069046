"""What comes to the engine in the harvest: chats of interactive users, in bursts or steadily, and three kinds of batch work.

All of it is drawn from seeds; a trace is a list, so that every policy meets the same one.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

SEED = 11
BURST_S, LULL_S, BURST_CALLS_PER_S = 10.0, 20.0, 8.0
STEADY_CALLS_PER_S = 1.0


class Ask(NamedTuple):
    """A call to be made: its prompt and its answer, in tokens."""

    prompt_tokens: int
    output_tokens: int


# The median and the spread of prompt and answer, in tokens: labels, extraction, and writing.
BATCH_KINDS = (((500, 0.7), (4, 0.5)), ((900, 0.7), (80, 0.6)), ((250, 0.7), (300, 0.5)))


def _size(chance: random.Random, median: float, spread: float, least: int, most: int) -> int:
    return min(most, max(least, round(chance.lognormvariate(0.0, spread) * median)))


def _chat(chance: random.Random) -> Ask:
    return Ask(_size(chance, 300, 1.0, 16, 4096), _size(chance, 120, 0.6, 8, 600))


def batch(seed: int = SEED) -> Iterator[Ask]:
    """Items without end, the three kinds in turn by lot."""
    chance = random.Random(f"batch {seed}")
    while True:
        (prompt, prompt_spread), (answer, answer_spread) = chance.choice(BATCH_KINDS)
        yield Ask(
            _size(chance, prompt, prompt_spread, 32, 4096),
            _size(chance, answer, answer_spread, 1, 1024),
        )


def bursty(duration_s: float, seed: int = SEED) -> list[tuple[float, Ask]]:
    """Bursts of about ten seconds with eight calls a second, and lulls of about twenty; moments in ms."""
    chance = random.Random(f"bursty {seed}")
    arrivals: list[tuple[float, Ask]] = []
    now_s = 5.0
    while now_s < duration_s:
        end_s = now_s + 2 + chance.expovariate(1 / (BURST_S - 2))
        while (now_s := now_s + chance.expovariate(BURST_CALLS_PER_S)) < end_s:
            arrivals.append((now_s * 1000, _chat(chance)))
        now_s = end_s + 3 + chance.expovariate(1 / (LULL_S - 3))
    return [arrival for arrival in arrivals if arrival[0] < duration_s * 1000]


def steady(duration_s: float, seed: int = SEED) -> list[tuple[float, Ask]]:
    """One call a second at the rate of a Poisson process, so that the engine is empty about half of the time."""
    chance = random.Random(f"steady {seed}")
    arrivals: list[tuple[float, Ask]] = []
    now_s = 0.0
    while (now_s := now_s + chance.expovariate(STEADY_CALLS_PER_S)) < duration_s:
        arrivals.append((now_s * 1000, _chat(chance)))
    return arrivals


def no_calls(duration_s: float, seed: int = SEED) -> list[tuple[float, Ask]]:
    return []


TRACES: dict[str, Callable[..., list[tuple[float, Ask]]]] = {"bursty": bursty, "steady": steady, "none": no_calls}
