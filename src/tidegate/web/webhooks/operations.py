"""The descriptions of this door's routes, with the structs that check their bodies and write their
answers.
"""

from tidegate.web.http.answers import Page
from tidegate.web.http.operations import PAGE, Operation, OperationTable
from tidegate.web.webhooks import webhooks

OPERATIONS: OperationTable = {
    ("POST", "/v1/webhook_endpoints"): Operation(
        "Create a webhook endpoint", webhooks.EndpointCreate, webhooks.EndpointObject
    ),
    ("GET", "/v1/webhook_endpoints"): Operation(
        "List webhook endpoints", gives=Page[webhooks.EndpointObject], query=PAGE
    ),
    ("GET", "/v1/webhook_endpoints/{webhook_endpoint_id}"): Operation(
        "Show a webhook endpoint", gives=webhooks.EndpointObject
    ),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}"): Operation(
        "Change a webhook endpoint", webhooks.EndpointChange, webhooks.EndpointObject
    ),
    ("DELETE", "/v1/webhook_endpoints/{webhook_endpoint_id}"): Operation(
        "Delete a webhook endpoint", gives=webhooks.EndpointDeleted
    ),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret"): Operation(
        "Rotate a signing secret", webhooks.SecretRotation, webhooks.EndpointObject
    ),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): Operation(
        "Send a test event", webhooks.EndpointTest, webhooks.EndpointTestResult
    ),
    ("GET", "/v1/webhook_event_types"): Operation("List types of events", gives=webhooks.EventTypeList),
    ("GET", "/v1/webhook_deliveries"): Operation(
        "List deliveries", gives=Page[webhooks.DeliveryObject], query=(*PAGE, "status")
    ),
    ("POST", "/v1/webhook_deliveries/{delivery_id}/replay"): Operation(
        "Send a delivery again", gives=webhooks.DeliveryObject
    ),
}
