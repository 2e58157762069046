"""The way of a multipart upload's bytes from the socket to a blob."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.requests import Request

from tidegate.core.errors import ApiProblem
from tidegate.stages.accept import Reception, Upload
from tidegate.web.http.intake import Intake
from tidegate.web.http.multipart import OVERHEAD_BYTES_MAX, FileBegins, UploadForm
from tidegate.web.requests import requests


@asynccontextmanager
async def received_file(
    request: Request,
    form: UploadForm,
    reception: Reception,
    size_bytes_max: int,
    too_large: ApiProblem,
    admit: Callable[[Mapping[str, str]], None] | None = None,
) -> AsyncIterator[Upload]:
    """Receive the file of a form.

    Its bytes are thrown away if the block fails.

    `admit` may refuse a form by the fields before its file, before any byte of the file is stored;
    without it, a wrong purpose is refused.
    """
    intake: Intake = request.scope["tidegate.intake"]
    upload: Upload | None = None
    try:
        async for received in intake.chunks(size_bytes_max + OVERHEAD_BYTES_MAX, too_large):
            for chunk in form.feed(received):
                if isinstance(chunk, FileBegins):
                    if admit is not None:
                        admit(form.fields)
                    elif "purpose" in form.fields:
                        requests.purpose(form.fields)
                    upload = await reception.begin_upload(size_bytes_max, too_large)
                elif upload is not None:
                    await upload.write(chunk)
        form.finish()
        assert upload is not None
        if upload.size_bytes == 0:
            raise ApiProblem(400, "empty_file", "The file is empty.", param=form.file_field)
        yield upload
    except BaseException:
        if upload is not None:
            await upload.abandon()
        raise
