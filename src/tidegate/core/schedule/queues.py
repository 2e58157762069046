"""The order between named queues: strict, by weight, or an operator's own.

It knows no job, only the state of each queue.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec


class QueueView(msgspec.Struct, frozen=True):
    """A queue with ready work.

    Units in flight are those of the jobs shown; `leased_at` is this worker's own last turn.
    """

    queue: str
    jobs: int
    left_units: int
    in_flight_units: int
    oldest_created_at: int
    leased_at: int | None


# Returns names of queues, best first. Queues left out come last and unknown names are skipped, so
# no queue can get lost.
QueueOrder = Callable[[Sequence[QueueView]], Sequence[str]]


class StrictOrder(msgspec.Struct, frozen=True):
    """The order as listed: a later queue gets only what the earlier ones leave.

    Unlisted queues come last, oldest job first.
    """

    queues: tuple[str, ...] = ()

    def __call__(self, views: Sequence[QueueView]) -> list[str]:
        place = {queue: number for number, queue in enumerate(self.queues)}
        last = len(place)
        return [
            view.queue
            for view in sorted(
                views, key=lambda view: (place.get(view.queue, last), view.oldest_created_at, view.queue)
            )
        ]


class WeightedOrder(msgspec.Struct, frozen=True):
    """An order that keeps work in flight in proportion to weights, 1 by default; the longest
    without a turn wins a tie.
    """

    weights: Mapping[str, float] = msgspec.field(default_factory=dict)

    def __call__(self, views: Sequence[QueueView]) -> list[str]:
        def load(view: QueueView) -> tuple[float, int, str]:
            weight = max(self.weights.get(view.queue, 1.0), 1e-9)
            return view.in_flight_units / weight, -1 if view.leased_at is None else view.leased_at, view.queue

        return [view.queue for view in sorted(views, key=load)]


def ordered(order: QueueOrder, views: Sequence[QueueView], faults: list[str]) -> list[str]:
    """Return the names of all these queues in order; when the order fails, note the fault and use
    the built-in one.
    """
    known = {view.queue for view in views}
    try:
        named = [queue for queue in dict.fromkeys(order(views)) if queue in known]
    except Exception as fault:
        faults.append(f"queue_order failed: {type(fault).__name__}: {fault}")
        named = []
    missing = [queue for queue in StrictOrder()(views) if queue not in set(named)]
    return named + missing
