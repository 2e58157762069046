"""JSON answers, for every door."""

import msgspec
from starlette.responses import Response


def json_answer(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
