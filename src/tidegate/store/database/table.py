"""The base of all groups of verbs: the driver, the decorators of verbs, and Idempotency-Keys.

A verb is a method whose first argument is the transaction. `@reads`, `@writes`, `@frees` and
`@beats` open that transaction, so callers omit the argument. The driver may run a verb several
times, so it changes nothing but the database.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Idempotency
from tidegate.store.database.driver import TransactionBody, Transactions, Tx

SLICE_COLUMNS = (
    "job_id", "first", "count", "model", "endpoint", "state", "ready_at", "lease_count", "lost_count", "read_first", "work_at",
    "work_bytes", "work_units",
)  # fmt: skip
IDEMPOTENCY_KEEP_MS = 24 * 3600 * 1000


P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound="Table")
Verb = Callable[Concatenate[A, Tx, P], Coroutine[Any, Any, T]]
VerbCall = Callable[Concatenate[A, P], Coroutine[Any, Any, T]]


class ChangeWitness(Protocol):
    """An observer that notes what a write changes, in the same transaction."""

    async def look(self, tx: Tx) -> Any:
        """Return the present state of the object."""

    async def note(self, tx: Tx, before: Any, after: Any) -> None:
        """Note the states before and after, if they differ."""


class Table:
    """A group of verbs about one noun. With a witness, each write notes what it changes."""

    def __init__(self, driver: Transactions, witness: ChangeWitness | None = None) -> None:
        self._driver = driver
        self._witness = witness


class JoinedTransaction:
    """A runner of verbs inside a transaction that is open already. They commit with it."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    async def write(self, body: TransactionBody[T]) -> T:
        return await body(self._tx)

    read = beat = free = write


def reads(verb: Verb[A, P, T]) -> VerbCall[A, P, T]:
    """Run the verb on one consistent snapshot."""

    @wraps(verb)
    def call(self: A, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self._driver.read(_named(verb, lambda tx: verb(self, tx, *args, **kwargs)))

    return call


def writes(verb: Verb[A, P, T]) -> VerbCall[A, P, T]:
    """Run the verb in a transaction and commit it.

    After StoreUnavailable it may have committed or not.
    """

    @wraps(verb)
    def call(self: A, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self._driver.write(_noted(self, verb, lambda tx: verb(self, tx, *args, **kwargs)))

    return call


def frees(verb: Verb[A, P, T]) -> VerbCall[A, P, T]:
    """Run a verb that writes and frees room.

    On a full disk it may use the room reserved for that.
    """

    @wraps(verb)
    def call(self: A, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self._driver.free(_noted(self, verb, lambda tx: verb(self, tx, *args, **kwargs)))

    return call


def _noted(table: Table, verb: Callable[..., Any], body: TransactionBody[T]) -> TransactionBody[T]:
    """Return a body whose changes are noted by the table's witness, if it has one."""
    witness = table._witness
    return _named(verb, body if witness is None else _witnessed(witness, body))


def _witnessed(witness: ChangeWitness, body: TransactionBody[T]) -> TransactionBody[T]:
    async def watched(tx: Tx) -> T:
        before = await witness.look(tx)
        result = await body(tx)
        await witness.note(tx, before, await witness.look(tx))
        return result

    return watched


def beats(verb: Verb[A, P, T]) -> VerbCall[A, P, T]:
    """Run a verb that writes, on the connection that is reserved for heartbeats."""

    @wraps(verb)
    def call(self: A, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self._driver.beat(_named(verb, lambda tx: verb(self, tx, *args, **kwargs)))

    return call


def _named(verb: Callable[..., Any], body: TransactionBody[T]) -> TransactionBody[T]:
    """Give the body the name of the verb, which the simulation reads."""
    body.__qualname__ = verb.__qualname__
    return body


async def idempotent_object(tx: Tx, tenant_id: str, route: str, idempotency: Idempotency | None) -> str | None:
    """Return the object that this key made before. Refuse a key that came with another body."""
    if idempotency is None:
        return None
    row = await tx.one(
        "idempotency_get", tenant_id=tenant_id, route=route, key=idempotency.key, keep_ms=IDEMPOTENCY_KEEP_MS
    )
    if row is None:
        return None
    body_hash, object_id = row
    if body_hash != idempotency.body_hash:
        _refuse_reuse()
    return str(object_id)


async def remember_object(tx: Tx, tenant_id: str, route: str, idempotency: Idempotency | None, object_id: str) -> None:
    if idempotency is None:
        return
    await tx.all(
        "idempotency_forget", tenant_id=tenant_id, route=route, key=idempotency.key, keep_ms=IDEMPOTENCY_KEEP_MS
    )
    await tx.all(
        "idempotency_put",
        tenant_id=tenant_id,
        route=route,
        key=idempotency.key,
        body_hash=idempotency.body_hash,
        object_id=object_id,
    )


async def forget_object(tx: Tx, tenant_id: str, route: str, key: str, object_id: str) -> None:
    """Let a key be used again after the object that it made was taken back."""
    await tx.all("idempotency_take_back", tenant_id=tenant_id, route=route, key=key, object_id=object_id)


def refuse_forgotten() -> NoReturn:
    """Refuse a key whose object is deleted: making it again could pay for the same work twice."""
    raise ApiProblem(
        409,
        "idempotency_result_deleted",
        "What this Idempotency-Key made in the last 24 hours is deleted. Send a new key to make it again.",
        param="Idempotency-Key",
    )


def _refuse_reuse() -> NoReturn:
    raise ApiProblem(
        422,
        "idempotency_key_reused",
        "This Idempotency-Key was used in the last 24 hours with a different request. Send a new key with the new request.",
        param="Idempotency-Key",
    )
