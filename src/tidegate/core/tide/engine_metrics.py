"""Read an engine's own metrics: Prometheus text into the few figures that the tide looks at.

Gauges are read as they are; counters and histograms become rates and means between two readings.
The text comes from another server, so nothing in it can raise: a figure that is missing, malformed,
absurd or too large is unknown, which is None. Series of several engines behind one page are added
up (of the cache's use, the fullest counts). Where the page names several models, those of the
deployment count alone. This module fetches nothing and knows no clock.
"""

import math
from collections.abc import Collection, Mapping

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.core.tide.signals import EngineSample

TEXT_BYTES_MAX = 8 << 20
LINE_CHARS_MAX = 4096
SERIES_MAX = 10_000
# Engines that split one model over several GPUs may show each part with the same figures: do not
# add these up.
RANK_LABELS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
MODEL_LABELS = ("model_name", "model")
GAUGE_MAX = 1e6


class MetricNames(msgspec.Struct, frozen=True):
    """The names of each figure on an engine's page, the newest name first.

    `ttft` and `between_tokens` are histograms in seconds, named without `_sum` and `_count`;
    `prompt_tokens` is a counter; the others are gauges, `kv_use` from 0 to 1.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_use: tuple[str, ...] = ()
    ttft: tuple[str, ...] = ()
    between_tokens: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()


VLLM = MetricNames(
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ttft=("vllm:time_to_first_token_seconds",),
    between_tokens=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    prompt_tokens=("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
)
SGLANG = MetricNames(
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_use=("sglang:token_usage",),
    ttft=("sglang:time_to_first_token_seconds",),
    between_tokens=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    prompt_tokens=("sglang:prompt_tokens_total", "sglang:prompt_tokens"),
)


def metric_names(given: Mapping[str, str]) -> MetricNames:
    """Return the metric names of an engine that we do not know, as its operator gives them."""
    known = list(MetricNames.__struct_fields__)
    for key, name in given.items():
        if key not in known:
            raise SettingsError(f"there is no engine figure {key!r}: use one of {', '.join(known)}")
        if not name or not isinstance(name, str) or any(sign in name for sign in "{} \t\n"):
            raise SettingsError(
                f"{name!r} is no metric's name: give {key} the name that the engine's /metrics page shows"
            )
    return MetricNames(**{key: (name,) for key, name in given.items()})


class Reading(msgspec.Struct, frozen=True):
    """One page of metrics at one moment: gauges, and counters since the engine started."""

    at_ms: float
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    between_sum_s: float | None = None
    between_count: float | None = None
    prompt_tokens: float | None = None


def read(text: bytes, names: MetricNames, at_ms: float, models: Collection[str] = ()) -> Reading:
    """Return the figures on one page; none of a page that is too large."""
    if len(text) > TEXT_BYTES_MAX:
        return Reading(at_ms)
    wanted = {
        series
        for alternatives, ends in _wanted(names)
        for name in alternatives
        for series in (name + end for end in ends)
    }
    found = _series(text, wanted, models)

    def total(alternatives: tuple[str, ...], end: str = "") -> float | None:
        return next((sum(found[name + end]) for name in alternatives if name + end in found), None)

    kv_use = next((max(found[name]) for name in names.kv_use if name in found), None)
    return Reading(
        at_ms,
        running=_gauge(total(names.running)),
        waiting=_gauge(total(names.waiting)),
        kv_use=None if kv_use is None or kv_use > 1.01 else min(kv_use, 1.0),
        ttft_sum_s=total(names.ttft, "_sum"),
        ttft_count=total(names.ttft, "_count"),
        between_sum_s=total(names.between_tokens, "_sum"),
        between_count=total(names.between_tokens, "_count"),
        prompt_tokens=total(names.prompt_tokens),
    )


def sample(before: Reading | None, after: Reading, known: int | None) -> EngineSample:
    """Return what happened between two readings; `known` as in the sample.

    Without a first reading, or after the engine started again, only the gauges count.
    """
    elapsed_ms = after.at_ms - before.at_ms if before else 0.0
    if before is None or elapsed_ms <= 0.0:
        return EngineSample(after.at_ms, known, after.running, after.waiting, after.kv_use)
    prompt_tokens = _grown(before.prompt_tokens, after.prompt_tokens)
    return EngineSample(
        after.at_ms,
        known,
        after.running,
        after.waiting,
        after.kv_use,
        ttft_ms=_mean_ms(before.ttft_sum_s, after.ttft_sum_s, before.ttft_count, after.ttft_count),
        between_tokens_ms=_mean_ms(
            before.between_sum_s, after.between_sum_s, before.between_count, after.between_count
        ),
        prompt_tokens_per_s=None if prompt_tokens is None else prompt_tokens / elapsed_ms * 1000,
    )


def _wanted(names: MetricNames) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    plain, histogram = ("",), ("_sum", "_count")
    return [
        (names.running, plain),
        (names.waiting, plain),
        (names.kv_use, plain),
        (names.ttft, histogram),
        (names.between_tokens, histogram),
        (names.prompt_tokens, plain),
    ]


def _series(text: bytes, wanted: Collection[str], models: Collection[str]) -> dict[str, list[float]]:
    """Return every value of the wanted metrics, one per series; of the deployment's models alone
    where the page names them.
    """
    values: dict[str, dict[str, float]] = {}
    ours: dict[str, dict[str, float]] = {}
    count = 0
    for line in text.decode("utf-8", "replace").split("\n"):
        place = line.find("{")
        name = line[:place] if place >= 0 else line.split(" ", 1)[0]
        if name not in wanted or len(line) > LINE_CHARS_MAX or count >= SERIES_MAX:
            continue
        parsed = _value(line[len(name) :])
        if parsed is None:
            continue
        count += 1
        labels, value = parsed
        key = ",".join(sorted(label for label in labels if label.partition("=")[0] not in RANK_LABELS))
        series = values.setdefault(name, {})
        # The same series twice, or once for each part of one engine, counts as one: take the larger
        # value.
        series[key] = max(value, series.get(key, 0.0))
        if any(f'{label}="{model}"' in labels for label in MODEL_LABELS for model in models):
            ours.setdefault(name, {})[key] = series[key]
    return {name: list(ours.get(name, series).values()) for name, series in values.items()}


def _value(rest: str) -> tuple[list[str], float] | None:
    """Return the labels and the value after a metric's name; None for a value that is no number
    from zero up.
    """
    labels: list[str] = []
    # This sign begins an exemplar: one observation of many, with labels and a value of its own.
    rest = rest.split(" # ", 1)[0]
    if rest.startswith("{"):
        inside, closed, rest = rest[1:].rpartition("}")
        if not closed:
            return None
        labels = [label.strip() for label in inside.split(",") if label.strip()]
    try:
        value = float(rest.split(None, 1)[0])
    except (ValueError, IndexError):
        return None
    return (labels, value) if math.isfinite(value) and value >= 0.0 else None


def _gauge(value: float | None) -> float | None:
    return value if value is not None and value <= GAUGE_MAX else None


def _grown(before: float | None, after: float | None) -> float | None:
    """Return by how much a counter grew; None when it fell, because then the engine started
    again."""
    if before is None or after is None or after < before:
        return None
    return after - before


def _mean_ms(
    sum_before_s: float | None, sum_after_s: float | None, count_before: float | None, count_after: float | None
) -> float | None:
    seconds, count = _grown(sum_before_s, sum_after_s), _grown(count_before, count_after)
    return seconds / count * 1000 if seconds is not None and count else None
