"""The audio endpoints, transcriptions and translations: a form with a file in, words out.

The words follow from the file's bytes and the prompt. For tests, the answer also has the received
file's name, size and hash.
"""

import re
from hashlib import sha256

import msgspec

from tidegate.simulate.engine.answers import SimulatedAnswer
from tidegate.simulate.engine.forms import BadFields
from tidegate.simulate.engine.requests import SimulatedRequest, behaviour_in

_DISPOSITION = re.compile(rb'form-data; name="([^"]+)"(?:; filename="([^"]*)")?', re.IGNORECASE)


class Transcript:
    """The answer to an audio request."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body."""
        return b'{"text":"%s","usage":{"type":"tokens","input_tokens":%d,"output_tokens":%d,"total_tokens":%d},%s}' % (
            answer.choices[0].text,
            answer.prompt_tokens,
            answer.output_tokens,
            answer.prompt_tokens + answer.output_tokens,
            answer.ask.echo,
        )


def audio_request(body: bytes) -> SimulatedRequest:
    """Read an audio request from its form."""
    fields, name, data = _read_form(body)
    model, prompt = fields.get(b"model"), fields.get(b"prompt", b"").decode()
    if not model or not data:
        raise BadFields("the form needs a model and a file", "file" if model else "model")
    digest = sha256(data).hexdigest()
    received = {"name": name.decode(), "bytes": len(data), "sha256": digest}
    others = {key.decode(): value.decode() for key, value in fields.items()}
    return SimulatedRequest(
        model=model.decode(),
        prompts=[f"{prompt}\n{digest}".encode()],
        marked=behaviour_in(prompt),
        echo=b'"received":%s,"fields":%s' % (msgspec.json.encode(received), msgspec.json.encode(others)),
    )


def _read_form(body: bytes) -> tuple[dict[bytes, bytes], bytes, bytes]:
    """Return the fields, and the name and the bytes of the file."""
    boundary, found, rest = body.partition(b"\r\n")
    if not found or not boundary.startswith(b"--") or not rest.endswith(boundary + b"--\r\n"):
        raise BadFields("the body is no form")
    fields: dict[bytes, bytes] = {}
    name = data = b""
    for part in rest.removesuffix(b"\r\n" + boundary + b"--\r\n").split(b"\r\n" + boundary + b"\r\n"):
        head, _, value = part.partition(b"\r\n\r\n")
        disposition = _DISPOSITION.search(head)
        if disposition is None:
            raise BadFields("a part of the form has no name")
        if disposition[2] is None:
            fields[disposition[1]] = value
        else:
            name, data = disposition[2], value
    return fields, name, data
