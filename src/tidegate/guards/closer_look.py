"""A check of bodies for fields that a caller may not set, in a thread if the body is large."""

import asyncio
import traceback

import structlog

from tidegate.core.body_rules.caller_fields import FieldFault, FieldRules, field_fault

log = structlog.get_logger()

# A larger body is checked in a thread, so that the event loop goes on.
LOOK_HERE_BYTES_MAX = 64 << 10


async def look_closely(body: bytes, rules: FieldRules) -> FieldFault | None:
    """Return the first fault of a body's fields; None if the body may be sent."""
    try:
        if len(body) <= LOOK_HERE_BYTES_MAX:
            return field_fault(body, rules)
        return await asyncio.to_thread(field_fault, body, rules)
    except Exception as error:
        # A bug of ours that one body triggers must not stop the worker for all others.
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        log.error("body_check_failed", kind=kind, place=f"{place.filename}:{place.lineno}")
        return FieldFault(
            "invalid_request", f"The body could not be looked at ({kind}): the operator's log says where.", ""
        )
