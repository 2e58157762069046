"""The states of everything that has one, and the only moves between them.

The guards that enforce these moves stand in `store/queries/`; a test holds the two and the schema to one another.
"""

from enum import StrEnum


class JobState(StrEnum):
    """What the wire calls a batch's status. `closing` beside it says where an open job is headed."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class JobKind(StrEnum):
    """What a job was made for: a batch; one background response; or a response whose caller deleted it, which is forgotten at its end."""

    BATCH = "batch"
    RESPONSE = "response"
    DELETED = "deleted"


class SliceState(StrEnum):
    READY = "ready"
    LEASED = "leased"
    DONE = "done"


class Outcome(StrEnum):
    """What became of an item; an outcome row is written once and never changed."""

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
    """Whether the queue of one share owner for one model has anything to do."""

    ASLEEP = "asleep"
    AWAKE = "awake"


class JobModelState(StrEnum):
    """Whether the scheduler may find slices of this model in a job."""

    OPEN = "open"
    HELD = "held"
    CLOSED = "closed"


class DeliveryState(StrEnum):
    """What became of one event on its way to one webhook endpoint."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class UploadState(StrEnum):
    """How a file that comes in parts stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class OperationState(StrEnum):
    """How far an action on every matching job has come."""

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
# What was delivered or failed can be asked to go out again.
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
