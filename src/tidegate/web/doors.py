"""The list of all front doors, the one place outside of its room that names a door.

A new door is a new room and a line here.
"""

from tidegate.core.keys import Scopes
from tidegate.web.background.door import BackgroundDoor
from tidegate.web.completion_batch.door import CompletionBatchDoor
from tidegate.web.gateway.door import GatewayDoor
from tidegate.web.jobs.front_door import FrontDoor
from tidegate.web.message_batches.door import MessageBatchDoor
from tidegate.web.openai.door import OpenAIDoor
from tidegate.web.webhooks.door import WebhookDoor

DOORS: tuple[FrontDoor, ...] = (
    OpenAIDoor(),
    MessageBatchDoor(),
    CompletionBatchDoor(),
    WebhookDoor(),
    BackgroundDoor(),
    GatewayDoor(),
)

# The scopes that a tenant's key may have: all that any door needs.
SCOPES = Scopes(
    tuple(dict.fromkeys(scope for door in DOORS for scope in door.scopes)),
    frozenset(scope for door in DOORS for scope in door.environment_scopes),
)
