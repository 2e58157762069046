"""The board that the processes of one engine share: counters, fault rates, counts of failed calls.

It is one small file that each process maps into its memory. A process adds only to its own
counters, so adding takes no lock; readers sum over all. The file ends with the engine.
"""

import fcntl
import mmap
import os
import struct
from hashlib import blake2b

import msgspec

COUNTER_COUNT = 1024
FAULTS_BYTES_MAX = 4096 - 16
ATTEMPT_COUNT_MAX = 1 << 16

_PAGE = 4096
_HEADER = struct.Struct("<QQ")
_ATTEMPT = struct.Struct("<8sQ")
_PROBE_COUNT_MAX = 64


def board_bytes(processes: int) -> int:
    """Return the size of the file."""
    return _PAGE + processes * COUNTER_COUNT * 8 + ATTEMPT_COUNT_MAX * _ATTEMPT.size


class Board:
    """One process's view of the shared file.

    `fd` is open for reading and writing and stays the caller's.
    """

    def __init__(self, fd: int, processes: int, index: int) -> None:
        size = board_bytes(processes)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)
        self._all = self._view[_PAGE : _PAGE + processes * COUNTER_COUNT * 8].cast("Q")
        self._attempts_at = _PAGE + processes * COUNTER_COUNT * 8
        self.counters = self._all[index * COUNTER_COUNT : (index + 1) * COUNTER_COUNT]

    def sums(self) -> list[int]:
        """Return each counter, summed over the processes."""
        numbers = self._all.tolist()
        return [sum(numbers[place::COUNTER_COUNT]) for place in range(COUNTER_COUNT)]

    def faults_version(self) -> int:
        """Return a number that changes with the fault rates; 0 before any were set."""
        return int.from_bytes(self._view[:8], "little")

    def faults(self) -> dict[str, float]:
        """Return the fault rates that were last set at run time."""
        with _Locked(self._fd):
            _, length = _HEADER.unpack_from(self._map)
            text = self._map[_HEADER.size : _HEADER.size + length]
        return msgspec.json.decode(text, type=dict[str, float]) if text else {}

    def set_faults(self, rates: dict[str, float]) -> None:
        """Set the fault rates of all processes, from their next call on."""
        text = msgspec.json.encode(rates)
        if len(text) > FAULTS_BYTES_MAX:
            raise ValueError(f"the fault rates take {len(text)} bytes: keep them under {FAULTS_BYTES_MAX}")
        with _Locked(self._fd):
            version = self.faults_version()
            self._map[_HEADER.size : _HEADER.size + len(text)] = text
            _HEADER.pack_into(self._map, 0, version + 1, len(text))

    def attempt(self, key: bytes) -> int:
        """Count a call of `key` and return how many came before it.

        If there are too many keys, the count of another one is overwritten.
        """
        name = blake2b(key, digest_size=8).digest()
        start = int.from_bytes(name, "little")
        with _Locked(self._fd):
            for probe in range(_PROBE_COUNT_MAX):
                at = self._attempts_at + (start + probe) % ATTEMPT_COUNT_MAX * _ATTEMPT.size
                holder, count = _ATTEMPT.unpack_from(self._map, at)
                if holder == name or not count:
                    break
            else:
                at = self._attempts_at + start % ATTEMPT_COUNT_MAX * _ATTEMPT.size
                count = 0
            _ATTEMPT.pack_into(self._map, at, name, count + 1)
        return int(count)

    def close(self) -> None:
        """Close the mapping."""
        self.counters.release()
        self._all.release()
        self._view.release()
        self._map.close()


class _Locked:
    """The board's lock between processes.

    Within a process the event loop's single thread is enough.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
