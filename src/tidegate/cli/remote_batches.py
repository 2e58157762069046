"""Batches as a server shows them over HTTP, in the words and the shape that commands print."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tidegate.cli import results
from tidegate.cli.server_client import AskedServer
from tidegate.cli.signals import Stopping
from tidegate.core.job_lists import JobFilter
from tidegate.core.states import JOB_ENDED

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


async def newest(
    server: AskedServer, org: str | None, wanted: JobFilter, limit: int, path: str = OWN
) -> list[dict[str, Any]]:
    """Return the newest batches that match, page by page: the caller's own, or every organization's."""
    asked = {"status": wanted.status, "model": wanted.model, "error_code": wanted.error_code, "q": wanted.words}
    asked |= {f"metadata[{name}]": value for name, value in wanted.metadata.items()}
    query = {name: str(value) for name, value in asked.items() if value is not None}
    found: list[dict[str, Any]] = []
    while len(found) < limit:
        page = query | {"limit": str(min(limit - len(found), PAGE_COUNT_MAX))}
        if found:
            page["after"] = found[-1]["id"]
        answer = await server.get(f"{path}?{urlencode(page)}", dict[str, Any], tenant=org)
        found += [facts(batch) for batch in answer["data"]]
        if not answer["has_more"]:
            break
    return found


async def items(
    server: AskedServer, org: str | None, batch: str, wanted: dict[str, str], limit: int
) -> list[dict[str, Any]]:
    """Return what became of a batch's requests, page by page."""
    found: list[dict[str, Any]] = []
    query = dict(wanted)
    while len(found) < limit:
        query["limit"] = str(min(limit - len(found), PAGE_COUNT_MAX))
        page = await server.get(f"/v1/batches/{batch}/items?{urlencode(query)}", dict[str, Any], tenant=org)
        found += page["data"]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    return found


async def output(server: AskedServer, batch: str, target: Path | None, *, errors: bool, follow: bool) -> int:
    """Write a batch's results as a server has them, and go on until it ends where that is asked for."""
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
