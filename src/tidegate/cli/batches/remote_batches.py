"""Reads batches from a server over HTTP, and describes them as commands print them."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from tidegate.cli.terminal import results
from tidegate.cli.terminal.server_client import LACKS_SCOPE, UNKNOWN_URL, AskedServer, ServerClient
from tidegate.cli.terminal.signals import Stopping
from tidegate.core.errors import ApiProblem
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.nouns import FOREVER_MS
from tidegate.core.states import JOB_ENDED

T = TypeVar("T")

FOLLOW_EVERY_S = 1.0
PAGE_COUNT_MAX = 100
OWN, EVERY = "/v1/batches", "/admin/v1/batches"
_TIMES = (
    "created",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
    "expires",
)
_EXTRAS = ("priority", "not_before", "paused_at", "max_cost", "max_errors", "stopped_by", "cost")


async def at_either(server: AskedServer, ask: Callable[[str], Awaitable[T]], *, operator_first: bool = False) -> T:
    """Ask for batches as their owner or, if the key is no owner's, as an operator, who sees all
    organizations' batches."""
    first, second = (EVERY, OWN) if operator_first else (OWN, EVERY)
    try:
        return await ask(first)
    except ApiProblem as refused:
        # A key has the scopes of an owner or those of an operator, and operators may have an
        # address of their own.
        if refused.code not in (LACKS_SCOPE, UNKNOWN_URL):
            raise
        first_refusal = refused
    try:
        return await ask(second)
    except ApiProblem as refused:
        if refused.code not in (LACKS_SCOPE, UNKNOWN_URL):
            raise
        own, operators = (refused, first_refusal) if operator_first else (first_refusal, refused)
        raise operators if operators.code == UNKNOWN_URL or await _is_operator(server) else own from None


async def owner(server: AskedServer, org: str | None, batch: str) -> str | None:
    """Return the organization to name: the given one or, at the server of this machine, the one
    that owns the batch."""
    if org is not None or not isinstance(server, ServerClient):
        return org
    return str((await server.get(f"{EVERY}/{batch}", dict[str, Any]))["org"])


async def _is_operator(server: AskedServer) -> bool:
    """Return whether the key may list all organizations' batches."""
    try:
        await server.get(f"{EVERY}?limit=1", dict[str, Any])
    except ApiProblem:
        return False
    return True


def facts(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of the API as commands show it."""
    counts, usage, extras = batch["request_counts"], batch["usage"], batch["tidegate"]
    return {
        **{name: batch[name] for name in ("id", "status", "endpoint", "model")},
        **{name: counts[name] for name in ("total", "completed", "failed")},
        **{name: batch[name] for name in ("input_file_id", "output_file_id", "error_file_id")},
        **{name: extras[name] for name in ("output_bytes", "error_bytes")},
        **{f"{name}_at": batch[f"{name}_at"] for name in _TIMES},
        "usage": {
            "input_tokens": usage["input_tokens"],
            "cached_tokens": usage["input_tokens_details"]["cached_tokens"],
            "output_tokens": usage["output_tokens"],
            "reasoning_tokens": usage["output_tokens_details"]["reasoning_tokens"],
        },
        "metadata": batch["metadata"] or {},
        **{name: extras[name] for name in _EXTRAS},
        **{name: extras[name] for name in ("retry_of", "retried_by", "merged_output_file_id")},
        "errors": batch["errors"]["data"] if batch["errors"] else [],
        **{name: batch[name] for name in ("org",) if name in batch},
    }


async def matching(
    server: AskedServer, org: str | None, wanted: JobFilter, sort: JobSort, limit: int, path: str = OWN
) -> list[dict[str, Any]]:
    """Return the first batches that match, read page by page: the caller's own or, for an operator,
    those of one or all organizations."""
    asked = {"status": wanted.status, "model": wanted.model, "error_code": wanted.error_code, "q": wanted.words}
    asked["created_after"] = str(wanted.from_ms // 1000) if wanted.from_ms else None
    asked["created_before"] = None if wanted.to_ms == FOREVER_MS else str(wanted.to_ms // 1000)
    asked["sort"] = None if sort is JobSort.CREATED else sort.value
    if path == EVERY:
        asked["org"] = org
    asked |= {f"metadata[{name}]": value for name, value in wanted.metadata.items()}
    query = {name: str(value) for name, value in asked.items() if value is not None}
    found: list[dict[str, Any]] = []
    while len(found) < limit:
        page = query | {"limit": str(min(limit - len(found), PAGE_COUNT_MAX))}
        if found:
            page["after"] = found[-1]["id"]
        answer = await server.get(f"{path}?{urlencode(page)}", dict[str, Any])
        found += [facts(batch) for batch in answer["data"]]
        if not answer["has_more"]:
            break
    return found


async def items(
    server: AskedServer, org: str | None, path: str, wanted: dict[str, str], limit: int
) -> list[dict[str, Any]]:
    """Return the outcomes of a batch's requests, read page by page."""
    found: list[dict[str, Any]] = []
    query = dict(wanted)
    while len(found) < limit:
        query["limit"] = str(min(limit - len(found), PAGE_COUNT_MAX))
        page = await server.get(f"{path}/items?{urlencode(query)}", dict[str, Any], tenant=org)
        found += page["data"]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    return found


async def output(server: AskedServer, batch: str, target: Path | None, *, errors: bool, follow: bool) -> int:
    """Write a batch's results from a server; with `follow` go on until the batch ends.
    Return the exit code."""
    stopping, at = Stopping().listen(), 0
    kind = "errors" if errors else "output"
    while True:
        has_ended = (await server.get(f"/v1/batches/{batch}", dict[str, Any]))["status"] in JOB_ENDED
        stream = server.content(f"/v1/batches/{batch}/{kind}", start=at)
        if target is not None:
            await results.save(stream, target)
        else:
            at += await results.pour(stream)
        if has_ended or not follow:
            return 0
        if await stopping.wait(FOLLOW_EVERY_S):
            return stopping.exit_code
