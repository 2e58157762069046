"""Places where a test can make a process die, stop, fail or wait: one at every border of a phase.

They do nothing unless the process was started with TIDEGATE_FAILPOINTS (see settings):
`name=action[,name=action…]`.
- An action is `kill`, `stop`, `raise`, `raise:once` or `sleep:SECONDS`.
- `N*` before the action lets it pass N times first: `record_committed=3*kill`.
- `name@TEXT=action` acts only if the content that passes contains that text:
  `before_send@poison=kill`.
"""

import asyncio
import os
import signal

import msgspec

from tidegate.core.errors import SettingsError, TidegateError

NAMES = (
    "upload_blob_durable",
    "upload_committed",
    "create_committed",
    "ingest_taken",
    "ingest_work_durable",
    "ingest_committed",
    "lease_committed",
    "before_send",
    "after_answer",
    "record_durable",
    "record_committed",
    "job_closed",
    "publish_rest_durable",
    "publish_committed",
    "webhook_sent",
    "stop_released",
    "deliveries_deleted",
    "job_forgotten",
    "operation_stepped",
    "blob_removed",
)


class FailpointRaised(TidegateError):
    """The error that the action `raise` raises."""


class _Armed(msgspec.Struct):
    action: str
    passes_left: int
    text: bytes


ARMED: dict[str, _Armed] = {}


def arm(text: str) -> None:
    """Read the arming text; refuse an unknown name or action, so that no test passes
    because of a typing mistake."""
    ARMED.clear()
    for part in filter(None, (chunk.strip() for chunk in text.split(","))):
        place, _, action = part.partition("=")
        name, _, text = place.partition("@")
        passes, star, rest = action.partition("*")
        passes_left, action = (int(passes), rest) if star and passes.isdigit() else (0, action)
        if name not in NAMES or action.partition(":")[0] not in ("kill", "stop", "raise", "sleep"):
            raise SettingsError(
                f"unknown failpoint {part!r}: names are {', '.join(NAMES)}; actions kill, stop, raise, raise:once, sleep:S"
            )
        ARMED[name] = _Armed(action, passes_left, text.encode())


async def hit(name: str, content: bytes = b"") -> None:
    """Pass this place with this content, and act if it is armed for it."""
    if not ARMED:
        return
    armed = ARMED.get(name)
    if armed is None or armed.text not in content:
        return
    if armed.passes_left:
        armed.passes_left -= 1
        return
    action, _, argument = armed.action.partition(":")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        del ARMED[name]
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "sleep":
        await asyncio.sleep(float(argument))
    else:
        if argument == "once":
            del ARMED[name]
        raise FailpointRaised(f"failpoint {name}")
