"""The descriptions of routes, with the structs that check bodies and write answers.

The OpenAPI document is made from them.

Doors describe their own routes; those of operators are here.
"""

from tidegate.web.admin import (
    audit,
    autoscale,
    batches,
    budgets,
    deliveries,
    deployments,
    keys,
    operations,
    overview,
    scheduler,
)
from tidegate.web.doors import DOORS
from tidegate.web.http.answers import Page
from tidegate.web.http.operations import PAGE, Operation, OperationTable
from tidegate.web.jobs.error_groups import ErrorKinds
from tidegate.web.jobs.explanation import Explanation
from tidegate.web.jobs.job_items import ItemDetail, ItemShown
from tidegate.web.requests.filter_requests import FILTERS
from tidegate.web.requests.retry_requests import OperatorRetryRequest
from tidegate.web.webhooks import webhooks

_ONE = "/admin/v1/batches/{batch_id}"

OPERATIONS: OperationTable = {
    **{route: operation for door in DOORS for route, operation in door.operations().items()},
    ("GET", "/admin/v1/overview"): Operation("What runs, waits and is stuck", gives=overview.Overview),
    ("GET", "/admin/v1/batches"): Operation(
        "List batches of every tenant", gives=Page[batches.AdminBatch], query=(*PAGE, "org", "sort", *FILTERS)
    ),
    ("GET", _ONE): Operation("Show a batch of any tenant", gives=batches.AdminBatch),
    ("GET", f"{_ONE}/timeline"): Operation("Show the life of a batch", gives=batches.Timeline),
    ("GET", f"{_ONE}/explain"): Operation("Say why a batch of any tenant runs or waits", gives=Explanation),
    **{
        ("POST", f"{_ONE}/{verb}"): Operation(summary, gives=batches.AdminBatch)
        for verb, summary in {
            "cancel": "Cancel a batch of any tenant",
            "pause": "Pause a batch of any tenant",
            "resume": "Resume a batch of any tenant",
            "retry_finalization": "Try again to publish a batch",
            "requeue": "Look again at what of a batch rests",
            "fail": "End a batch as failed, and keep its results",
            "abandon": "Give up a batch that cannot be published",
        }.items()
    },
    ("POST", f"{_ONE}/retry"): Operation(
        "Run a batch's failed requests again, as a new batch", OperatorRetryRequest, batches.AdminBatch
    ),
    ("GET", f"{_ONE}/errors"): Operation("List the kinds of errors of a batch", gives=ErrorKinds),
    ("GET", f"{_ONE}/items"): Operation(
        "List what became of a batch's requests, of any tenant", gives=Page[ItemShown], query=(*PAGE, "outcome", "code")
    ),
    ("GET", f"{_ONE}/items/{{custom_id:path}}"): Operation(
        "Show one request of a batch of any tenant", gives=ItemDetail
    ),
    ("POST", "/admin/v1/operations"): Operation(
        "Change every batch that matches a filter", operations.OperationRequest, operations.OperationShown
    ),
    ("GET", "/admin/v1/operations"): Operation("List operations", gives=Page[operations.OperationShown], query=PAGE),
    ("GET", "/admin/v1/operations/{operation_id}"): Operation(
        "Show an operation and its progress", gives=operations.OperationShown
    ),
    ("POST", "/admin/v1/operations/{operation_id}/cancel"): Operation(
        "Let an operation change nothing more", gives=operations.OperationShown
    ),
    ("GET", "/admin/v1/autoscale"): Operation("Show how many replicas are needed", gives=autoscale.Autoscale),
    ("GET", "/admin/v1/autoscale/workers"): Operation(
        "Show how many workers are needed", gives=autoscale.ReplicasShown
    ),
    ("GET", "/admin/v1/autoscale/models/{model:path}"): Operation(
        "Show how many replicas of a model are needed", gives=autoscale.ModelReplicas
    ),
    ("GET", "/admin/v1/workers"): Operation("List processes", gives=Page[overview.WorkerShown]),
    ("GET", "/admin/v1/flows"): Operation("List flows", gives=Page[overview.FlowShown], query=("limit", "model")),
    ("POST", "/admin/v1/flows/refresh"): Operation("Look again at resting flows", gives=overview.FlowsRefreshed),
    ("GET", "/admin/v1/orgs"): Operation("List organizations", gives=Page[overview.OrgShown], query=PAGE),
    ("GET", "/admin/v1/budgets"): Operation(
        "List what organizations' limits have left", gives=Page[budgets.OrgBudgets], query=(*PAGE, "org")
    ),
    ("GET", "/admin/v1/model_capacity"): Operation(
        "Show what may be sent to each model", gives=Page[overview.ModelCapacity]
    ),
    **{
        (method, f"/admin/v1/{kind}s{rest}"): Operation(f"{verb} {kind}s", takes, gives)
        for kind in ("deployment", "resource", "model")
        for method, rest, verb, takes, gives in (
            ("GET", "", "List", None, deployments.RoutingList),
            ("POST", "/add", "Add", deployments.RoutingRequest, deployments.RoutingDone),
            ("POST", "/change", "Change", deployments.RoutingRequest, deployments.RoutingDone),
            ("POST", "/remove", "Remove", deployments.RoutingRequest, deployments.RoutingDone),
        )
    },
    **{
        ("POST", f"/admin/v1/deployments/{{name:path}}/{verb}"): Operation(summary, gives=deployments.RoutingDone)
        for verb, summary in (
            ("drain", "Send a deployment no new calls"),
            ("resume", "Send a drained deployment calls again"),
        )
    },
    ("POST", "/admin/v1/deployments/{name:path}/refresh"): Operation(
        "Try a deployment at once", gives=deployments.DeploymentRefreshed
    ),
    ("GET", "/admin/v1/scheduler"): Operation("Show the scheduler's modes", gives=scheduler.SchedulerStatus),
    ("POST", "/admin/v1/scheduler"): Operation(
        "Switch the scheduler's modes", scheduler.SchedulerRequest, scheduler.SchedulerStatus
    ),
    ("GET", "/admin/v1/keys"): Operation("List keys", gives=Page[keys.KeyShown], query=(*PAGE, "org")),
    ("POST", "/admin/v1/keys"): Operation("Create a key", keys.KeyRequest, keys.KeyMade),
    ("POST", "/admin/v1/keys/{key_id}/change"): Operation("Change a key", keys.KeyChange, keys.KeyChanged),
    ("POST", "/admin/v1/keys/{key_id}/rotate"): Operation("Rotate a key", keys.KeyRotation, keys.KeyMade),
    ("POST", "/admin/v1/keys/{key_id}/revoke"): Operation("Revoke a key", gives=keys.KeyRevoked),
    ("POST", "/admin/v1/keys/delete"): Operation("Delete keys", keys.KeyDeletion, keys.KeysDeleted),
    ("GET", "/admin/v1/usage"): Operation("Export usage", query=("by", "format", "from", "org", "to")),
    ("GET", "/admin/v1/deliveries"): Operation(
        "List deliveries of every tenant", gives=Page[deliveries.AdminDelivery], query=(*PAGE, "org", "status")
    ),
    ("POST", "/admin/v1/deliveries/{delivery_id}/replay"): Operation(
        "Send any tenant's delivery again", gives=webhooks.DeliveryObject
    ),
    ("GET", "/admin/v1/audit"): Operation(
        "List what operators changed",
        gives=Page[audit.ChangeShown],
        query=(*PAGE, "actor", "action", "target"),
    ),
}
