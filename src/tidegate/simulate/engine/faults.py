"""Faults by script: the meaning of a behaviour's text, and the draw of a call's behaviour.

A behaviour is a list of steps with commas between them, each `KIND[=VALUE][:ra=WHEN][xTIMES]`:

    429  429:ra=2  429:ra=date  503x3      a status (400 to 599), with a Retry-After, only for the first three calls
    latency=200  slow=200  slowloris       wait before the answer, spread its body over a time, one byte at a time
    hang  hang_body  half  reset  reset_before  longlength         the connection goes wrong
    malformed  html  empty  null  nochoices  error200  huge=BYTES  pretty  badgzip  bomb=BYTES  redirect   the body does
    unfit                                  an answer in JSON loses its first brace, so that its text fits no schema
"""

import re
from collections.abc import Mapping
from random import Random

import msgspec

DELAYS = frozenset({"latency", "slow", "slowloris"})
BODIES = frozenset(
    {
        "malformed",
        "html",
        "empty",
        "null",
        "nochoices",
        "error200",
        "huge",
        "pretty",
        "badgzip",
        "bomb",
        "redirect",
        "unfit",
    }
)
WRECKS = frozenset({"hang", "hang_body", "half", "reset", "reset_before", "longlength"})
UNANSWERED = frozenset({"hang", "reset_before"})
KINDS = DELAYS | BODIES | WRECKS

_STEP = re.compile(
    r"(?P<kind>\d{3}|error200|[a-z_]+?)(?:=(?P<value>\d{1,12}))?(?::ra=(?P<retry_after>[^,x]{1,60}))?(?:x(?P<times>\d{1,6}))?"
)


class BadBehaviour(ValueError):
    """The text names no known behaviour; the message lists the known ones."""


class FaultStep(msgspec.Struct, frozen=True):
    """One step of a behaviour."""

    kind: str
    value: int | None = None
    retry_after: str | None = None
    times: int | None = None

    @property
    def status(self) -> int | None:
        """Return the error status that this step answers with; None for other kinds."""
        return int(self.kind) if self.kind.isdigit() else None


class Behaviour(msgspec.Struct, frozen=True):
    """The behaviour of the engine for one call: delays, and at most one fault."""

    text: str
    delays: tuple[FaultStep, ...]
    fault: FaultStep | None

    @property
    def status(self) -> int:
        """Return the status that will be sent; 0 if none is."""
        if self.fault is None:
            return 200
        if self.fault.kind == "redirect":
            return 307
        return 0 if self.fault.kind in UNANSWERED else self.fault.status or 200


def behaviour_from(text: str) -> Behaviour:
    """Read a behaviour's text; raise BadBehaviour if it has no meaning."""
    delays: list[FaultStep] = []
    faults: list[FaultStep] = []
    for chunk in text.split(","):
        step = _step_from(chunk.strip())
        (delays if step.kind in DELAYS else faults).append(step)
    if len(faults) > 1:
        raise BadBehaviour(f"the behaviour {text!r} has more than one fault: keep one, delays may stand beside it")
    return Behaviour(text=text, delays=tuple(delays), fault=faults[0] if faults else None)


def _step_from(chunk: str) -> FaultStep:
    found = _STEP.fullmatch(chunk)
    if found is None or not (found["kind"] in KINDS or (found["kind"].isdigit() and 400 <= int(found["kind"]) <= 599)):
        raise BadBehaviour(
            f"unknown behaviour {chunk!r}: use a status from 400 to 599 or one of {', '.join(sorted(KINDS))}"
        )
    return FaultStep(
        kind=found["kind"],
        value=int(found["value"]) if found["value"] else None,
        retry_after=found["retry_after"],
        times=int(found["times"]) if found["times"] else None,
    )


def rates_from(given: Mapping[str, float]) -> list[tuple[Behaviour, float]]:
    """Return behaviours with the share of calls for each; shares add up to at most 1."""
    rates = [(behaviour_from(text), float(share)) for text, share in given.items()]
    if any(not 0.0 <= share <= 1.0 for _, share in rates) or sum(share for _, share in rates) > 1.0 + 1e-9:
        raise BadBehaviour("each fault's rate must be between 0 and 1, and their sum at most 1")
    return rates


def rate_from_option(text: str) -> tuple[str, float]:
    """Read an option such as `429=0.05` or `503:ra=1=0.5`: the share stands after the last `=`."""
    behaviour, _, share = text.rpartition("=")
    try:
        rate = float(share)
    except ValueError:
        rate = -1.0
    if not behaviour or not 0.0 <= rate <= 1.0:
        raise BadBehaviour(f"{text!r} is not a fault with a rate: write it like 429=0.05")
    behaviour_from(behaviour)
    return behaviour, rate


class Chance:
    """A draw among behaviours by their rates; the same seed gives the same sequence."""

    def __init__(self, rates: list[tuple[Behaviour, float]], seed: int) -> None:
        self._rates = rates
        self._random = Random(seed)

    def draw(self) -> Behaviour | None:
        """Return the behaviour of the next call, or None."""
        if not self._rates:
            return None
        at = self._random.random()
        for behaviour, share in self._rates:
            if at < share:
                return behaviour
            at -= share
        return None
