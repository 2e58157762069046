"""Code that does not have the shape of `shape.py` yet. These lists only shrink: a test fails when an entry is not needed.

Delete the entry when you fix the code. When you only move it, correct the path.
"""

# Functions with more than 6 parameters.
WIDE_FUNCTIONS = {
    "upstream/calls/router.py open_router",
    "upstream/http/transport.py AiohttpClient.open",
    "upstream/http/transport.py AiohttpClient.post",
    "upstream/http/transport.py AiohttpTransport.call",
    "upstream/http/transport.py Client.post",
    "upstream/http/transport.py StreamingClient.open",
    "upstream/queue/asynchronous.py QueueClient.post",
    "upstream/queue/messages.py request",
}

# Constructors with more than 7 collaborators.
WIDE_CONSTRUCTORS = {
    "upstream/calls/router.py Router",
}

# Objects that call back into the object that made them.
CALLBACKS = {
    "backends/blobs_local.py LocalBlobs -> LocalLog(_log_path)",
    "backends/blobs_s3.py S3Blobs -> SpooledLog(_spool_path)",
    "simulate/engine/handler.py EngineHandler -> Outbox(fail)",
    "store/postgres.py PostgresDriver -> PostgresClock(_write_unchecked)",
    "upstream/budgets/budget_client.py BudgetClient -> Settlements(_freed)",
    "web/health.py Health -> HealthCheck(_ask_blobs)",
    "web/health.py Health -> HealthCheck(_ask_store)",
}

# Attributes that are set by another module than that of their class.
OUTSIDE_SETS = {
    "simulate/engine/answers_responses.py .sent_events",
    "simulate/engine/flight.py .cached_tokens",
    "simulate/engine/flight.py .written_tokens",
    "store/budgets.py .holder",
    "upstream/calls/budget_wait.py .retry_after_ms",
    "upstream/calls/feedback.py .body",
    "upstream/calls/feedback.py .retry_after_ms",
    "upstream/calls/named_calls.py .retry_after_ms",
    "upstream/grouping/groups.py .states",
    "upstream/http/transport.py .is_streamed",
    "upstream/routing/backpressure.py .background_rests_until_ms",
    "upstream/routing/probe.py .probes",
    "web/http/auth.py .open_call",
    "web/http/routes.py .tenant_id",
}
