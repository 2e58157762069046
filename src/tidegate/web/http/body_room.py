"""How many bytes of request bodies this process holds in memory at once, over all callers and for one tenant.

Uploads are not among them: they are written out as they come. It reads nothing and waits for nothing: what does not fit is refused.
"""

from collections import Counter

from tidegate.core.errors import ApiProblem

RETRY_AFTER_S = 1


class BodyRoom:
    def __init__(self, bytes_max: int, one_body_bytes_max: int) -> None:
        """One tenant may have half of it, and in any case one body of the largest size."""
        self._bytes_max = max(bytes_max, one_body_bytes_max)
        self._tenant_bytes_max = max(bytes_max // 2, one_body_bytes_max)
        self.held_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    def reserve_room(self, tenant_id: str, size_bytes: int) -> None:
        """Reserve room for so many bytes, or refuse the request."""
        if self._by_tenant[tenant_id] + size_bytes > self._tenant_bytes_max:
            raise ApiProblem(
                429,
                "request_bytes_exceeded",
                f"Your bodies under way may have {self._tenant_bytes_max:,} bytes together. Send it again once one is answered.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.held_bytes + size_bytes > self._bytes_max:
            raise ApiProblem(
                503,
                "server_busy",
                "The server holds as many bodies of calls as it can. Nothing was accepted: send the request again.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._by_tenant[tenant_id] += size_bytes
        self.held_bytes += size_bytes

    def release_room(self, tenant_id: str, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._by_tenant[tenant_id] -= size_bytes
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]
