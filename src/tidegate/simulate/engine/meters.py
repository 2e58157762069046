"""The engine's figures, as metrics with vLLM's names in Prometheus text, and as a summary of calls.

Each figure is one of the board's counters, so the processes of one engine show one sum. Times are
in whole microseconds.
"""

from bisect import bisect_left

from tidegate.simulate.engine.board import Board

STATUS_COUNT = 600
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
    "/v1/chat/completions/batch",
    "/v1/messages",
    "/v1/score",
    "/v1/rerank",
    "/v1/classify",
    "/v1/pooling",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/models",
    "other",
)
ROUTE_AT = STATUS_COUNT
RUNNING = 620
WAITING = 621
KV_USAGE_MILLIONTHS = 622
PREFIX_QUERIED = 623
PREFIX_HIT = 624
PREEMPTIONS = 625
PROMPT_TOKENS = 626
GENERATION_TOKENS = 627
SUCCESS = {"stop": 628, "length": 629, "abort": 630}

FIRST_TOKEN_AT = 700
BETWEEN_TOKENS_AT = 740
WHOLE_CALL_AT = 780

_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_BETWEEN_TOKENS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_WHOLE_CALL_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

_BUCKETS = {FIRST_TOKEN_AT: _FIRST_TOKEN_S, BETWEEN_TOKENS_AT: _BETWEEN_TOKENS_S, WHOLE_CALL_AT: _WHOLE_CALL_S}
_LABELS = 'engine="0",model_name="simulated"'

_GAUGES = (
    ("num_requests_running", RUNNING, 1.0, "Number of requests in model execution batches."),
    ("num_requests_waiting", WAITING, 1.0, "Number of requests waiting to be processed."),
    ("kv_cache_usage_perc", KV_USAGE_MILLIONTHS, 1e-6, "KV-cache usage. 1 means 100 percent usage."),
    ("gpu_cache_usage_perc", KV_USAGE_MILLIONTHS, 1e-6, "The older name of kv_cache_usage_perc."),
)
_COUNTERS = (
    ("prefix_cache_queries", PREFIX_QUERIED, "Prefix cache queries, in terms of number of queried tokens."),
    ("prefix_cache_hits", PREFIX_HIT, "Prefix cache hits, in terms of number of cached tokens."),
    ("num_preemptions", PREEMPTIONS, "Cumulative number of preemptions from the engine."),
    ("prompt_tokens", PROMPT_TOKENS, "Number of prefill tokens processed."),
    ("generation_tokens", GENERATION_TOKENS, "Number of generation tokens processed."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", FIRST_TOKEN_AT, "Histogram of time to first token in seconds."),
    ("inter_token_latency_seconds", BETWEEN_TOKENS_AT, "Histogram of inter-token latency in seconds."),
    ("time_per_output_token_seconds", BETWEEN_TOKENS_AT, "The older name of inter_token_latency_seconds."),
    ("e2e_request_latency_seconds", WHOLE_CALL_AT, "Histogram of end to end request latency in seconds."),
)


def observe(counters: "memoryview[int]", histogram: int, seconds: float) -> None:
    """Add one time to a histogram: at its place are its buckets, one for the rest, and the sum."""
    bounds = _BUCKETS[histogram]
    counters[histogram + bisect_left(bounds, seconds)] += 1
    counters[histogram + len(bounds) + 1] += int(seconds * 1e6)


def exposition(board: Board) -> bytes:
    """Return all metrics as Prometheus text."""
    sums = board.sums()
    lines: list[str] = []
    for name, place, scale, text in _GAUGES:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} gauge"]
        lines.append(f"vllm:{name}{{{_LABELS}}} {sums[place] * scale}")
    for name, place, text in _COUNTERS:
        lines += [f"# HELP vllm:{name}_total {text}", f"# TYPE vllm:{name}_total counter"]
        lines.append(f"vllm:{name}_total{{{_LABELS}}} {float(sums[place])}")
    lines += [
        "# HELP vllm:request_success_total Count of finished requests.",
        "# TYPE vllm:request_success_total counter",
    ]
    for reason, place in SUCCESS.items():
        lines.append(f'vllm:request_success_total{{{_LABELS},finished_reason="{reason}"}} {float(sums[place])}')
    for name, place, text in _HISTOGRAMS:
        lines += _histogram(name, text, sums, place)
    lines.append("")
    return "\n".join(lines).encode()


def _histogram(name: str, text: str, sums: list[int], place: int) -> list[str]:
    lines = [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} histogram"]
    bounds = _BUCKETS[place]
    total = 0
    for offset, bound in enumerate((*map(str, bounds), "+Inf")):
        total += sums[place + offset]
        lines.append(f'vllm:{name}_bucket{{{_LABELS},le="{bound}"}} {float(total)}')
    lines.append(f"vllm:{name}_count{{{_LABELS}}} {float(total)}")
    lines.append(f"vllm:{name}_sum{{{_LABELS}}} {sums[place + len(bounds) + 1] / 1e6}")
    return lines


def calls_summary(board: Board) -> dict[str, object]:
    """Return the number of calls, in all, by status (0: no answer) and by path."""
    sums = board.sums()
    by_status = {str(status): sums[status] for status in range(STATUS_COUNT) if sums[status]}
    by_path = {path: sums[ROUTE_AT + place] for place, path in enumerate(ROUTES) if sums[ROUTE_AT + place]}
    return {"calls": sum(by_status.values()), "by_status": by_status, "by_path": by_path}
