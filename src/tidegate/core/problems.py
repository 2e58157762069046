"""Refusals that several rooms must word alike.

An id that is absent, another tenant's, deleted or of no possible shape gets one and the same answer, byte for byte, so none of these
repeats what the caller sent.
"""

from tidegate.core.errors import ApiProblem


def no_such_file(param: str = "file_id") -> ApiProblem:
    return ApiProblem(
        404,
        "file_not_found",
        "There is no such file. Files expire and can be deleted: list yours with GET /v1/files, or upload it again.",
        param=param,
    )


def no_such_batch() -> ApiProblem:
    return ApiProblem(
        404, "batch_not_found", "There is no such batch. List yours with GET /v1/batches.", param="batch_id"
    )
