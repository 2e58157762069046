"""A body that is not plain is checked wherever there is room for it, and a check that breaks lets nothing through."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from tidegate.core.body_rules.caller_fields import STRICT, FieldFault, field_fault
from tidegate.guards import closer_look
from tidegate.guards.closer_look import LOOK_HERE_BYTES_MAX, look_closely

pytestmark = pytest.mark.anyio


def body_of(size: int, **more: Any) -> bytes:
    """A body of so many bytes."""
    empty = json.dumps({"model": "m", **more, "user": ""}).encode()
    return empty.replace(b'"user": ""', b'"user": "%s"' % (b"x" * (size - len(empty))))


@pytest.mark.parametrize("size", [LOOK_HERE_BYTES_MAX, LOOK_HERE_BYTES_MAX + 1])
async def test_a_large_body_is_checked_beside_the_event_loop_and_a_small_one_on_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(*asked: Any) -> FieldFault | None:
        threads.append(threading.current_thread())
        return field_fault(*asked)

    monkeypatch.setattr(closer_look, "field_fault", noted)
    fault = await look_closely(body_of(size, kv_transfer_params={}), STRICT)
    assert fault is not None
    assert "kv_transfer_params" in fault.message
    assert [thread is threading.main_thread() for thread in threads] == [size <= LOOK_HERE_BYTES_MAX]
    assert await look_closely(body_of(size), STRICT) is None


async def test_a_body_that_a_check_breaks_on_is_refused_and_the_log_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> FieldFault | None:
        raise ZeroDivisionError

    monkeypatch.setattr(closer_look, "field_fault", broken)
    with capture_logs() as logged:
        fault = await look_closely(b"{}", STRICT)
    assert fault is not None
    assert (fault.code, "ZeroDivisionError" in fault.message) == ("invalid_request", True)
    assert [(line["event"], line["kind"]) for line in logged] == [("body_check_failed", "ZeroDivisionError")]
    assert __file__ in logged[0]["place"]
