"""The states of everything that has one, and the only moves between them.

The guards that enforce these moves are in `store/queries/`; a test compares the two and the schema
with one another.
"""

from enum import StrEnum


class JobState(StrEnum):
    """The states of a job, which the wire calls a batch's status.

    `closing` beside it says where an open job is headed.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class JobKind(StrEnum):
    """The purposes of a job: a batch; a background response; or a response that its caller deleted,
    forgotten at its end.
    """

    BATCH = "batch"
    RESPONSE = "response"
    DELETED = "deleted"


class SliceState(StrEnum):
    READY = "ready"
    LEASED = "leased"
    DONE = "done"


class Outcome(StrEnum):
    """The possible ends of an item; an outcome row is written once and never changed."""

    ANSWERED = "answered"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class FileState(StrEnum):
    GROWING = "growing"
    READY = "ready"
    DELETED = "deleted"


class BlobState(StrEnum):
    WRITING = "writing"
    KEPT = "kept"
    CONDEMNED = "condemned"


class WorkerState(StrEnum):
    ALIVE = "alive"
    GONE = "gone"


class FlowState(StrEnum):
    """The states of a flow: whether it has anything to do."""

    ASLEEP = "asleep"
    AWAKE = "awake"


class JobModelState(StrEnum):
    """The states of a model in a job: whether the scheduler may find slices of it."""

    OPEN = "open"
    HELD = "held"
    CLOSED = "closed"


class DeliveryState(StrEnum):
    """The states of one event on its way to one webhook endpoint."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class UploadState(StrEnum):
    """The states of a file that comes in parts."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class OperationState(StrEnum):
    """The states of an action on every matching job."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


JOB_MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.IN_PROGRESS, JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED}),
    JobState.IN_PROGRESS: frozenset({JobState.CANCELLING, JobState.FINALIZING}),
    JobState.CANCELLING: frozenset({JobState.FINALIZING}),
    JobState.FINALIZING: frozenset({JobState.COMPLETED, JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.EXPIRED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
SLICE_MOVES: dict[SliceState, frozenset[SliceState]] = {
    SliceState.READY: frozenset({SliceState.LEASED}),
    SliceState.LEASED: frozenset({SliceState.READY, SliceState.DONE}),
    SliceState.DONE: frozenset(),
}
FILE_MOVES: dict[FileState, frozenset[FileState]] = {
    FileState.GROWING: frozenset({FileState.READY, FileState.DELETED}),
    FileState.READY: frozenset({FileState.DELETED}),
    FileState.DELETED: frozenset(),
}
BLOB_MOVES: dict[BlobState, frozenset[BlobState]] = {
    BlobState.WRITING: frozenset({BlobState.KEPT, BlobState.CONDEMNED}),
    BlobState.KEPT: frozenset({BlobState.CONDEMNED}),
    BlobState.CONDEMNED: frozenset(),
}
WORKER_MOVES: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.ALIVE: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}
FLOW_MOVES: dict[FlowState, frozenset[FlowState]] = {
    FlowState.ASLEEP: frozenset({FlowState.AWAKE}),
    FlowState.AWAKE: frozenset({FlowState.ASLEEP}),
}
JOB_MODEL_MOVES: dict[JobModelState, frozenset[JobModelState]] = {
    JobModelState.OPEN: frozenset({JobModelState.HELD, JobModelState.CLOSED}),
    JobModelState.HELD: frozenset({JobModelState.OPEN, JobModelState.CLOSED}),
    JobModelState.CLOSED: frozenset(),
}
# A delivered or failed event can be sent again on request.
DELIVERY_MOVES: dict[DeliveryState, frozenset[DeliveryState]] = {
    DeliveryState.PENDING: frozenset({DeliveryState.DELIVERED, DeliveryState.FAILED}),
    DeliveryState.DELIVERED: frozenset({DeliveryState.PENDING}),
    DeliveryState.FAILED: frozenset({DeliveryState.PENDING}),
}
UPLOAD_MOVES: dict[UploadState, frozenset[UploadState]] = {
    UploadState.PENDING: frozenset({UploadState.COMPLETED, UploadState.CANCELLED, UploadState.EXPIRED}),
    UploadState.COMPLETED: frozenset(),
    UploadState.CANCELLED: frozenset(),
    UploadState.EXPIRED: frozenset(),
}
OPERATION_MOVES: dict[OperationState, frozenset[OperationState]] = {
    OperationState.RUNNING: frozenset({OperationState.COMPLETED, OperationState.CANCELLED}),
    OperationState.COMPLETED: frozenset(),
    OperationState.CANCELLED: frozenset(),
}

JOB_ENDED = frozenset(state for state, moves in JOB_MOVES.items() if not moves)
