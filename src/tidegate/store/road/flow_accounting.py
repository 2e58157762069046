"""What a flush costs whom: service of flows, rates of workers, progress and usage of jobs, gathered while outcomes are added and
written last.

It counts only what was new to the store, so a replay charges nothing. It knows nothing of states or lines.
"""

import msgspec

from tidegate.core.nouns import Finished, Usage
from tidegate.core.states import Outcome
from tidegate.store.database.driver import Tx

_OUTPUT_WEIGHT = 2
NO_COST = (0, 0, 0)


def real_cost(usage: Usage) -> int:
    """Tokens as they are charged: an output token costs two."""
    return usage.input_tokens + _OUTPUT_WEIGHT * usage.output_tokens


class FlowAccounting(msgspec.Struct):
    """Sums of one transaction. Its rows are locked last and in one order, so two flushes wait for each other only for a moment."""

    _flows: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    _jobs: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    _rates: dict[tuple[str, str], list[int]] = msgspec.field(default_factory=dict)
    _usage: dict[tuple[str, str, str], list[int]] = msgspec.field(default_factory=dict)

    async def add(self, tx: Tx, job_id: str, share_owner: str, blob_id: str, entries: list[Finished]) -> None:
        """These items of a job are done, their lines stand in this log. What failed is charged too, or failing would be free; but it
        says nothing about how fast a model answers."""
        entries = await _with_models(tx, job_id, entries)
        costs: dict[str, int] = {}
        counts: dict[str, int] = {}
        for entry in entries:
            model = entry.model or ""
            cost = real_cost(entry.usage) or entry.units
            costs[model] = costs.get(model, 0) + cost
            counts[model] = counts.get(model, 0) + 1
            if entry.outcome is Outcome.ANSWERED:
                sums = self._rates.setdefault((model, blob_id), [0, 0, 0, 0, 0, 0])
                sums[0] += entry.units
                sums[1] += cost
                sums[2] += 1
                sums[3] = max(sums[3], entry.took_ms)
                sums[4] += entry.took_ms
                sums[5] += entry.usage.input_tokens
            if entry.tries:
                for one in entry.tries:
                    self._use((job_id, one.model, one.deployment), one.usage, one.cost_nano)
            elif entry.outcome is Outcome.ANSWERED or entry.deployment:
                # An answer that policy did not let through was paid for all the same.
                self._use((job_id, model, entry.deployment), entry.usage, entry.cost_nano)
        for model, cost in costs.items():
            self._flows[model, share_owner] = self._flows.get((model, share_owner), 0) + cost
            self._jobs[job_id, model] = self._jobs.get((job_id, model), 0) + counts[model]

    def _use(self, name: tuple[str, str, str], usage: Usage, cost_nano: tuple[int, int, int]) -> None:
        """Add what an answer used and cost, to the token and the billionth. `name` is its job, model and deployment."""
        sums = self._usage.get(name)
        if sums is None:
            sums = self._usage[name] = [0] * 8
        sums[0] += 1
        sums[1] += usage.input_tokens
        sums[2] += usage.cached_tokens
        sums[3] += usage.output_tokens
        sums[4] += usage.reasoning_tokens
        if cost_nano != NO_COST:
            sums[5:] = [sums[5] + cost_nano[0], sums[6] + cost_nano[1], sums[7] + cost_nano[2]]

    async def write_charges(self, tx: Tx, owners: dict[str, str]) -> None:
        """Write it all down. A rate belongs to the worker whose log holds the lines, so no other worker writes its row."""
        if not self._jobs:
            return
        jobs = [(done_count, job_id, model) for (job_id, model), done_count in sorted(self._jobs.items())]
        await tx.many("job_models_done", jobs)
        flows = [(cost, model, share_owner) for (model, share_owner), cost in sorted(self._flows.items())]
        await tx.many("flow_charge", flows)
        rates = [
            (model, owners[blob_id], *sums)
            for (model, blob_id), sums in sorted(self._rates.items())
            if blob_id in owners
        ]
        if rates:
            await tx.many("rate_add", rates)
        if self._usage:
            await tx.many(
                "usage_add",
                [
                    (model, deployment, *sums, job_id)
                    for (job_id, model, deployment), sums in sorted(self._usage.items())
                ],
            )


async def _with_models(tx: Tx, job_id: str, entries: list[Finished]) -> list[Finished]:
    """Entries whose model and units the recorder knew; what was found in a log is looked up, once per slice."""
    if all(entry.model is not None for entry in entries):
        return entries
    known: list[Finished] = []
    low, high, model, units = 0, 0, "", 0
    for entry in sorted(entries, key=lambda one: one.number):
        if entry.model is not None:
            known.append(entry)
            continue
        if not low <= entry.number < high:
            row = await tx.one("slice_of_item", job_id=job_id, number=entry.number)
            if row is None:
                continue
            low, high, model, units = row[0], row[0] + row[1], row[2], row[3] // max(1, row[1])
        known.append(
            Finished(
                entry.number, entry.outcome, entry.size_bytes, entry.slice_first, entry.token, entry.usage,
                entry.attempt_count, model, units, entry.deployment, entry.cost_nano,
            )
        )  # fmt: skip
    return known
