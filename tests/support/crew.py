"""One API and several workers over PostgreSQL, under limits, with two witnesses: the engine's calls log, and what workers sent.

A limit is judged by the moment of sending. The engine cannot know it, so workers run under a preload shim that writes it down; what a call
took is in the engine's log, by the same Idempotency-Key. It asserts nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.processes import Proc, wait_until
from tests.support.shims import SendsLog, preload_env
from tests.support.tidegate import END_S, TIDEGATE, Site
from tests.support.windows import Use
from tidegate.cli.batches.explain import explain_inputs_of
from tidegate.core.schedule.explain import explain

WORKERS = 4
POLL_S = 0.1


def deployment(url: str, **more: Any) -> dict[str, Any]:
    return {"deployments": [{"url": url, **more}]}


def per_minute(requests: int | None = None, tokens: int | None = None) -> list[dict[str, Any]]:
    """A limit as settings and callers write it."""
    given = {"requests": requests, "tokens": tokens}
    return [{"period": "minute", **{name: count for name, count in given.items() if count is not None}}]


class Crew:
    """A site with its workers; `sends` sees all that they send."""

    def __init__(self, site: Site, sends: SendsLog) -> None:
        self.site = site
        self.sends = sends
        self.workers: list[Proc] = []

    def start(self, count: int = WORKERS) -> None:
        self.site.api()
        for _ in range(count):
            self.add_worker()

    def add_worker(self, more: Mapping[str, str] | None = None) -> Proc:
        under_the_shim = preload_env(self.sends, base=dict(more or {}))
        proc = self.site.worker(more=under_the_shim, name=f"worker{len(self.workers)}")
        self.workers.append(proc)
        return proc

    def kill_one(self) -> Proc:
        """The first that still runs, without a word."""
        victim = next(proc for proc in self.workers if proc.running)
        victim.kill()
        return victim

    # ---- what was sent

    def sent(self, model: str | None = None) -> list[Use]:
        """The moment of each call to a model, or to any, one by one."""
        return [(at, 1) for at, _ in self._sent(model)]

    def sent_tokens(self, model: str | None = None) -> list[Use]:
        """The same with the tokens that each took. One that never arrived took none."""
        tokens: Counter[str] = Counter()
        for call in self.site.calls():
            key = call["idempotency_key"]
            tokens[key] = max(tokens[key], call.get("tokens", 0))
        return [(at, tokens[key]) for at, key in self._sent(model)]

    def arrived(self, model: str | None = None) -> list[Use]:
        """What the engine itself would count."""
        return [(call["at"], 1) for call in self.calls(model)]

    def calls(self, model: str | None = None) -> list[dict[str, Any]]:
        return [call for call in self.site.calls() if model in (None, call["model"])]

    def until_called(self, count: int, model: str | None = None, timeout_s: float = END_S) -> None:
        what = f"{count} calls to {model or 'any model'}"
        wait_until(lambda: len(self.calls(model)) >= count, timeout_s, what, poll_s=POLL_S)

    def most_at_once(self, model: str | None = None) -> int:
        """The most calls that the engine ever had under way together."""
        return max((call.get("beside", 0) + 1 for call in self.calls(model)), default=0)

    def _sent(self, model: str | None) -> list[tuple[float, str]]:
        sent = self.sends.sent()
        if model is None:
            return sent
        keys = {call["idempotency_key"] for call in self.calls(model)}
        return [(at, key) for at, key in sent if key in keys]

    # ---- commands

    def command(self, *arguments: str, code: int = 0) -> Proc:
        """A command of the operator's, run to its end."""
        args = [TIDEGATE, *arguments, "--data", str(self.site.data)]
        proc = self.site.processes.start(args, name=arguments[0], env=self.site.environment())
        assert proc.wait(60) == code, proc.logs()
        return proc

    def explain(self, batch_id: str, org: str | None = None) -> str:
        """What `tidegate explain` says; asked without a process of its own, which would cost a second of CPU."""
        job, explain_inputs = asyncio.run(explain_inputs_of(self.site.settings, org, batch_id))
        return "\n".join(explain(job, explain_inputs))


def items_of(calls: Sequence[Mapping[str, Any]]) -> list[str]:
    """The items that calls were made for, in the order of the calls."""
    return [str(call["idempotency_key"]).partition("-")[0] for call in calls]
