"""Refusals that several rooms must word alike.

An id that is absent, another tenant's, deleted or of no possible shape gets one and the same
answer, which contains only the id that the caller sent. Each begins with OpenAI's sentence, because
clients match it.
"""

from tidegate.core.errors import ApiProblem

ID_CHARS_MAX = 64


def no_such_file(file_id: str, param: str = "file_id") -> ApiProblem:
    return ApiProblem(
        404,
        "file_not_found",
        f"No such File object: {shown_id(file_id)}. Files expire and can be deleted: list yours with GET /v1/files, or upload it again.",
        param=param,
    )


def no_such_webhook_endpoint(endpoint_id: str) -> ApiProblem:
    return ApiProblem(
        404,
        "webhook_endpoint_not_found",
        f"No webhook endpoint found with id '{shown_id(endpoint_id)}'. List yours with GET /v1/webhook_endpoints.",
        param="webhook_endpoint_id",
    )


def no_such_delivery(delivery_id: str, listed: str = "List yours with GET /v1/webhook_deliveries.") -> ApiProblem:
    return ApiProblem(
        404,
        "webhook_delivery_not_found",
        f"No webhook delivery found with id '{shown_id(delivery_id)}'. {listed}",
        param="delivery_id",
    )


def no_delivery_of_anyone(delivery_id: str) -> ApiProblem:
    """Return the refusal for operators, who see the deliveries of every organization."""
    listed = "Those of every organization are under Deliveries in the console, and at GET /admin/v1/deliveries."
    return no_such_delivery(delivery_id, listed)


def no_such_batch(
    batch_id: str, param: str = "batch_id", listed: str = "List yours with GET /v1/batches."
) -> ApiProblem:
    return ApiProblem(404, "batch_not_found", f"No batch found with id '{shown_id(batch_id)}'. {listed}", param=param)


def no_batch_of_anyone(batch_id: str, param: str = "batch_id") -> ApiProblem:
    """Return the refusal for operators, who see the batches of every organization."""
    listed = "Those of every organization are under Batches in the console, and at GET /admin/v1/batches."
    return no_such_batch(batch_id, param, listed)


def no_such_upload(upload_id: str) -> ApiProblem:
    return ApiProblem(
        404,
        "upload_not_found",
        f"No such Upload object: {shown_id(upload_id)}. Create one with POST /v1/uploads.",
        param="upload_id",
    )


def upload_not_pending(status: str) -> ApiProblem:
    """Return the refusal to change an upload that has ended.

    It is a 400, because clients repeat what a 409 refused.
    """
    return ApiProblem(
        400,
        "upload_not_pending",
        f"The upload has the status '{status}', and only a pending one can be changed. Create another with POST /v1/uploads.",
        param="upload_id",
    )


def batch_not_ended(param: str = "batch_id") -> ApiProblem:
    return ApiProblem(
        409, "batch_not_ended", "This batch has not ended. Wait for its end, or cancel it first.", param=param
    )


def batch_not_retryable(why: str) -> ApiProblem:
    return ApiProblem(409, "batch_not_retryable", f"This batch cannot be retried. {why}", param="batch_id")


def no_such_response(response_id: str) -> ApiProblem:
    return ApiProblem(
        404,
        "response_not_found",
        f"Response with id '{shown_id(response_id)}' not found. Only responses with `background: true` are kept, as long as files are.",
        param="response_id",
    )


def shown_id(sent: str) -> str:
    """Return the id that the caller sent, bounded and without anything that is not plain ASCII."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in sent[:ID_CHARS_MAX])
