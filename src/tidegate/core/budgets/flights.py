"""The amounts in flight of a budget in money, each with its holder.

An amount counts for an hour, or until its holder is known to be gone. A holder is a process's
incarnation, kept as a number of six bytes made from its name. An amount without a holder stays for
the hour. This module knows neither limits nor who is alive.
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b

from tidegate.core.budgets.counting import HOUR, Sliding, stepped_back

NO_HOLDER = 0
_MARK_BYTES = 6
# The first number of the packed form. A window packed without holders begins with its debt instead,
# which is 0.
_WITH_HOLDERS = 1


def mark_of(holder: str) -> int:
    """Return the number of a holder."""
    return int.from_bytes(blake2b(holder.encode(), digest_size=_MARK_BYTES).digest()) if holder else NO_HOLDER


class Flights(Sliding):
    __slots__ = ("_whose",)

    def __init__(self) -> None:
        super().__init__(HOUR)
        self._whose: dict[tuple[int, int], int] = {}

    def roll(self, now: int, limit: int | None) -> None:
        if not self._at:
            return
        bucket = now // self._span.bucket_ms
        ahead = self._at[-1] - bucket
        if ahead > 0:
            # Step back as the window does when the database's clock went back.
            before, self._whose = self._whose, {}
            for (at, mark), count in before.items():
                one = (stepped_back(at, ahead, bucket), mark)
                self._whose[one] = self._whose.get(one, 0) + count
        had = len(self._at)
        super().roll(now, None)
        if len(self._at) < had:
            left = set(self._at)
            self._whose = {one: count for one, count in self._whose.items() if one[0] in left}

    def move(self, ms: int) -> None:
        super().move(ms)
        buckets = -(-ms // self._span.bucket_ms)
        self._whose = {(at + buckets, mark): count for (at, mark), count in self._whose.items()}

    def begin_flights(self, now: int, count: int, mark: int) -> None:
        """Add an amount in flight for this holder."""
        if count:
            self.add(now, count)
            one = (self._at[-1], mark)
            self._whose[one] = self._whose.get(one, 0) + count

    def end_flights(self, granted_at: int, count: int, mark: int) -> None:
        """Remove an amount that this holder was granted at a moment from what is in flight."""
        self._end((granted_at // self._span.bucket_ms, mark), count)

    def forget(self, living: Collection[int]) -> bool:
        """Drop what every holder outside `living` has in flight; return whether there was any."""
        gone = [one for one in self._whose if one[1] != NO_HOLDER and one[1] not in living]
        for one in gone:
            self._end(one, self._whose[one])
        return bool(gone)

    def _end(self, one: tuple[int, int], count: int) -> None:
        known = self._whose.get(one, 0)
        self.undo_taken(one[0] * self._span.bucket_ms, min(count, known), owed=False)
        if count < known:
            self._whose[one] = known - count
        else:
            self._whose.pop(one, None)

    def pack(self) -> list[int]:
        return [_WITH_HOLDERS, *(number for one in sorted(self._whose) for number in (*one, self._whose[one]))]

    @classmethod
    def restored(cls, numbers: Sequence[int]) -> "Flights":
        """Return the flights that `pack` wrote; ValueError for anything else."""
        if not numbers or min(numbers) < 0 or numbers[0] > _WITH_HOLDERS:
            raise ValueError("a count that cannot be")
        flights = cls()
        if numbers[0] == _WITH_HOLDERS:
            triples = list(zip(numbers[1::3], numbers[2::3], numbers[3::3], strict=True))
        else:
            old = Sliding.unpack(HOUR, numbers)
            triples = [(at, NO_HOLDER, count) for at, count in zip(old._at, old._counts, strict=True)]
        for at, mark, count in triples:
            if flights._at and at < flights._at[-1]:
                raise ValueError("flights out of order")
            flights._put(at, count)
            flights._whose[at, mark] = flights._whose.get((at, mark), 0) + count
        # Refuse what is no valid plain window: buckets out of time, or more of them than a window
        # holds.
        Sliding.unpack(HOUR, Sliding.pack(flights))
        return flights
