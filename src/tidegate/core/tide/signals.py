"""The signals of one deployment at one moment, and the decision that the tide draws from them.

Nothing is decided here. A signal that was not measured is None, never zero: a deployment without
metrics is not idle.
"""

import msgspec

UNLIMITED_TOKENS = 1 << 40

# Calls of one kind, which is a model and an endpoint, can be compared.
CallKind = tuple[str, str]


class EngineSample(msgspec.Struct, frozen=True):
    """Metrics of an engine between its last two scrapes; None for what it does not show.

    `known` are the calls of ours, batch and gateway, of all our processes, that were in flight
    during the scrape (the larger of before and after): every other call comes from elsewhere. None
    where that is unknown.
    """

    at_ms: float
    known: int | None = None
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    ttft_ms: float | None = None
    between_tokens_ms: float | None = None
    prompt_tokens_per_s: float | None = None


class Ended(msgspec.Struct, frozen=True, gc=False):
    """An answered background call of ours: its prompt and its answer in tokens, how long it took,
    and its kind."""

    prompt_tokens: int
    answer_tokens: int
    latency_ms: float
    kind: CallKind = ("", "")


class Signals(msgspec.Struct, frozen=True):
    """One deployment at one moment: our own background calls, interactive calls, the engine's
    metrics, and refusals.

    `awaiting` are our calls without a first token, `awaiting_tokens` their prompts; `sent_tokens`
    are all prompts sent so far. `waiting_tokens` is the prompt of the ready item that has been held
    back for longest, `waiting_ms` for how long. `interactive` and `interactive_awaiting` are what
    our own gateway sees, at once; None where no traffic passes it. `sample` is the engine's last
    one, however often it was shown before. `ended` are the calls of ours that were answered since
    the last signals, `refusals` the 429s and 503s since then. `workers` are the processes that send
    background calls there: each has its share of what is allowed, and all counts of our own calls
    are of this process alone.
    """

    now_ms: float
    workers: int = 1
    in_flight: int = 0
    awaiting: int = 0
    awaiting_tokens: int = 0
    sent_tokens: int = 0
    waiting_tokens: int = 0
    waiting_ms: float = 0.0
    interactive: int | None = None
    interactive_awaiting: int | None = None
    sample: EngineSample | None = None
    ended: tuple[Ended, ...] = ()
    refusals: int = 0


class Decision(msgspec.Struct, frozen=True):
    """The calls and prompt tokens that batch may have under way, and the calls to hand back.

    `calls` may be in flight, `prompt_tokens` may wait for their first token, and `hand_back` calls
    without one are handed back now. `why` is a word and its numbers. `has_users`: interactive calls
    are the reason.
    """

    calls: int
    prompt_tokens: int
    hand_back: int
    why: str
    has_users: bool = False
