"""What the model servers write down: every call with its sender, its deployment, its moment and what became of it.

A call for several items is written down once for each of them; one of these leads and stands for the call itself. Calls of users belong
to no job.
"""

import math
import re
from dataclasses import dataclass

from tests.simulation.world.process import Process
from tidegate.core.nouns import Usage

# In every answer: which call it is, and for which item.
MARK = re.compile(rb"call-([0-9]+) ([a-z0-9-]+)")

# How a call is met whose answer does not fit the schema of its job.
INVALID = "invalid"
NOTHING = Usage()


def mark_of(serial: int, tag: str) -> str:
    return f"call-{serial} {tag}"


@dataclass(frozen=True, slots=True)
class User:
    """Who sends an interactive call, and which model or resource it asks for. A flex call takes the slots of background work."""

    tenant: int
    tenant_id: str
    key_id: str
    name: str
    asks_for: str
    is_stream: bool
    is_flex: bool


@dataclass(slots=True)
class Visit:
    """A user's call as long as its sender waits for it, whether or not it is ever sent."""

    user: User
    came_s: float
    ended_s: float = math.inf


@dataclass(slots=True)
class Witnessed:
    """One item's call as the model server saw it. `mood` says how it was met; `received_s` when its sender had the whole answer.

    `reserved` is what its sender had a permit for, in tokens. `usage` is the item's own, `whole_usage` that of the call, where it leads.
    `item_count` is how many items share the call. `wants_json`: its answer is held to a schema. `is_turned`: it is an item's, and has
    waited until it goes like a user's.
    A user's call has its first token at `first_s`, and may be left before it ends."""

    serial: int
    process: Process
    incarnation: str
    deployment: str
    job_id: str
    number: int
    key: str
    tag: str
    sent_s: float
    usage: Usage
    reserved: int = 0
    leads: bool = True
    item_count: int = 1
    whole_usage: Usage = NOTHING
    user: User | None = None
    is_turned: bool = False
    wants_json: bool = False
    mood: str = ""
    first_s: float | None = None
    is_streamed: bool = False
    received_s: float | None = None
    ended: bool = False
    aborted: bool = False
    ended_s: float = 0.0
    left: bool = False
    wait_s: float = 0.0
