"""The body of a callback: the kind of event, and the whole item or batch."""

import msgspec

from tidegate.core.answers.line_breaks import escape_line_breaks
from tidegate.core.ids import item_id
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs
from tidegate.core.webhooks import LeasedDelivery
from tidegate.store.store import Store
from tidegate.web.completion_batch import shapes
from tidegate.web.completion_batch.items import ItemReader
from tidegate.web.completion_batch.options import ITEM_EVENTS


class CallbackBodies:
    def __init__(self, store: Store, blobs: Blobs, body_bytes_max: int) -> None:
        self._store = store
        self._reader = ItemReader(store, blobs)
        self._body_bytes_max = body_bytes_max

    async def event_body(self, delivery: LeasedDelivery) -> bytes:
        """Return the body of an event.

        If it would be too large, it omits the answer and names what it omits. For a deleted batch
        or deleted results it has only the ids.
        """
        job = await self._store.any_job(delivery.job_id)
        notes = shapes.notes_of(job) if job is not None else None
        if job is None or notes is None:
            return _deleted(delivery)
        if delivery.item is None:
            return _body("BATCH_UPDATE", shapes.batch_entity(job, notes, 0))
        entity = await self._item(job, notes, delivery.item, delivery.event_type)
        if entity is None:
            return _deleted(delivery)
        body = _body("ITEM_UPDATE", entity)
        if len(body) > self._body_bytes_max:
            omitted = ["response", "request"] if len(entity.request) > self._body_bytes_max // 2 else ["response"]
            payload = msgspec.structs.replace(entity, **dict.fromkeys(omitted, shapes.NULL))
            reduced = {"event": "ITEM_UPDATE", "payload": payload, "omitted": omitted}
            body = escape_line_breaks(msgspec.json.encode(reduced))
        return body

    async def _item(self, job: Job, notes: shapes.DoorNotes, number: int, event_type: str) -> shapes.ItemEntity | None:
        if event_type == ITEM_EVENTS[0]:
            found = await self._reader.running(job, notes, number, 1)
            return found[0] if found else None
        return await self._reader.one(job, notes, number)


def _body(event: str, payload: object) -> bytes:
    return escape_line_breaks(msgspec.json.encode({"event": event, "payload": payload}))


def _deleted(delivery: LeasedDelivery) -> bytes:
    """Return the body of an event whose batch or results are deleted, from its delivery alone."""
    ids = {"batchId": delivery.job_id}
    if delivery.item is not None:
        ids["itemId"] = item_id(delivery.job_id, delivery.item)
    event = "BATCH_UPDATE" if delivery.item is None else "ITEM_UPDATE"
    return msgspec.json.encode({"event": event, "payload": ids, "type": delivery.event_type, "deleted": True})
