"""The rules for a line of an input, and the check of one line.

A line is read once into a typed shape that holds only what ingest needs; the prompt stays raw
bytes, and nothing is ever written back. Raw limits come before the parser. Further checks come
after it: no key named twice, nothing that the endpoint cannot run. Only a suspicious line pays for
a slow exact parse, and only a bad one for the words that `line_faults` finds. This module knows no
files, no order of items and no jobs.

`NaN` and `Infinity` are refused everywhere. A number too large for a double (`1e999`) or of more
than 128 digits is refused in parameters and in arrays of token ids, but not in messages and texts.
"""

import re
from contextlib import suppress

import msgspec
from msgspec import Raw

from tidegate.core.input.line_faults import NUMBER_DIGITS_MAX, BodyFault, LineFault, check_exactly, explain, shown
from tidegate.core.job_shape import AS_WRITTEN, InputPart, InputPlaces, ParameterLevel
from tidegate.core.json_limits import is_deeper_than, is_utf8
from tidegate.core.usage import estimate

MODEL_BYTES_MAX = 256
CHOICES_MAX = 128
NOTHING = Raw(b"")
# The endpoint of a job whose lines each name their own. It is no path, so a caller of `accept`
# cannot ask for it by accident.
MIXED = "mixed"


class ChosenLines(msgspec.Struct, frozen=True):
    """The lines of an input that run again.

    The error lines at `errors_path` name them: those with one of these outcomes and, where some are
    given, one of these codes and one of these kinds of errors (by their ids).
    """

    errors_path: str
    outcomes: tuple[str, ...]
    codes: tuple[str, ...]
    kinds: tuple[str, ...]


class EarlierJob(msgspec.Struct, frozen=True):
    """The places of an earlier job's input and answers, and the parameters of its lines.

    The parts of its input are joined at `joined_path`.
    """

    endpoint: str
    parts: tuple[InputPart, ...]
    levels: tuple[ParameterLevel, ...]
    joined_path: str
    answers_path: str


class LineRules(msgspec.Struct, frozen=True):
    """The limits and expectations for an input.

    - `endpoint`: lines name it in their `url` or leave it out; where it is MIXED, each line must
      name a path.
    - `models`: the models that the caller's key allows; None means any.
    - `input_sha256`: the hash of the input when it was accepted; not checked when empty.
    - `parts`: the input is first made of these, with the parameters of `levels` in its lines.
    - `chosen`: only these lines count. `sample`: so many lines come first.
    - `dedupe`: identical lines run once, and lines that an `earlier` job has answered do not run.
    - `places`: how messages name lines.
    """

    endpoint: str
    input_sha256: str = ""
    chosen: ChosenLines | None = None
    sample: int = 0
    dedupe: bool = False
    earlier: EarlierJob | None = None
    models: frozenset[str] | None = None
    single_model: bool = False
    invalid_lines: str = "fail"
    prefix_order: bool = True
    line_bytes_max: int = 1 << 20
    item_count_max: int = 50_000
    depth_max: int = 64
    custom_id_bytes_max: int = 512
    body_keys_max: int = 128
    inputs_max: int = 50_000
    errors_max: int = 100
    slice_count_max: int = 64
    slice_bytes_max: int = 1 << 20
    slice_units_max: int = 1 << 20
    max_tokens_max: int = 1_000_000
    default_output_tokens: int = 256
    levels: tuple[ParameterLevel, ...] = ()
    parts: tuple[InputPart, ...] = ()
    places: InputPlaces = AS_WRITTEN


class Endpoint(msgspec.Struct, frozen=True):
    """The key of the prompt in an endpoint's body, and how the endpoint uses it."""

    prompt: str | None
    has_messages: bool = False
    generates: bool = True
    counts_inputs: bool = False


ENDPOINTS = {
    "/v1/chat/completions": Endpoint("messages", has_messages=True),
    "/v1/messages": Endpoint("messages", has_messages=True),
    "/v1/responses": Endpoint("input"),
    "/v1/completions": Endpoint("prompt"),
    "/v1/embeddings": Endpoint("input", generates=False, counts_inputs=True),
    "/v1/moderations": Endpoint("input", generates=False),
    # Engines differ in the names of these texts, so no name is required.
    "/v1/score": Endpoint(None, generates=False),
    "/v1/rerank": Endpoint(None, generates=False),
    "/v1/classify": Endpoint(None, generates=False),
    "/v1/pooling": Endpoint(None, generates=False),
    # These read a file; a prompt is optional.
    "/v1/audio/transcriptions": Endpoint(None),
    "/v1/audio/translations": Endpoint(None),
}
# The model of a body that names none, for endpoints that allow it, as in OpenAI's documentation.
DEFAULT_MODELS = {"/v1/moderations": "omni-moderation-latest"}
# An endpoint that an operator adds needs only a body with a model.
OTHER_ENDPOINT = Endpoint(None)


class Body(msgspec.Struct, gc=False):
    """The parts of a request's body that ingest reads."""

    model: str | None = None
    messages: Raw = NOTHING
    input: Raw = NOTHING
    prompt: Raw = NOTHING
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    tools: Raw = NOTHING
    instructions: Raw = NOTHING
    system: Raw = NOTHING
    background: Raw = NOTHING
    text_1: Raw = NOTHING
    text_2: Raw = NOTHING
    query: Raw = NOTHING
    documents: Raw = NOTHING
    queries: Raw = NOTHING
    items: Raw = NOTHING
    data_1: Raw = NOTHING
    data_2: Raw = NOTHING


class LineRequest(msgspec.Struct, gc=False):
    """The parts of a line that ingest reads."""

    custom_id: str
    body: Body
    method: str | None = None
    url: str | None = None


class _LooseBody(msgspec.Struct, gc=False):
    """The parts of a body that can fail the whole batch."""

    model: str | None = None
    stream: Raw = NOTHING
    tools: Raw = NOTHING


class _LooseRequest(msgspec.Struct, gc=False):
    custom_id: str
    body: _LooseBody
    method: str | None = None
    url: str | None = None


class InputLine(msgspec.Struct, gc=False):
    """A line that may run.

    `fixed` is what an engine reads before the prompt: tools, instructions, a system text.
    `input_count` is 0 where inputs are not counted.
    """

    custom_id: str
    model: str
    endpoint: str
    prompt_key: str
    prompt_at: int
    prompt_size: int
    fixed: bytes
    output_tokens: int
    input_count: int


class _ToolType(msgspec.Struct, gc=False):
    type: str = ""


decode_request = msgspec.json.Decoder(LineRequest).decode
_decode_loosely = msgspec.json.Decoder(_LooseRequest).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_tools = msgspec.json.Decoder(list[_ToolType] | None).decode

# A second mention of these keys could make us and the upstream read different requests. The keys in
# _ESTIMATED_KEYS are left
# out: only an estimate reads them, and they are common names of a tool's parameters.
_ESTIMATED_KEYS = ("text_1", "text_2", "query", "documents", "queries", "items", "data_1", "data_2")
_READ_KEYS = frozenset(
    key.encode() for key in (*LineRequest.__struct_fields__, *Body.__struct_fields__) if key not in _ESTIMATED_KEYS
)
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
_ODD_NUMBER = re.compile(rb"[0-9.](?:[eE]\+?[0-9]{3}|[0-9.]{%d})" % NUMBER_DIGITS_MAX)


def endpoint_of(path: str) -> Endpoint:
    return ENDPOINTS.get(path, OTHER_ENDPOINT)


def path_of(url: str | None, rules: LineRules) -> str:
    """Return the endpoint of a line with this `url`; empty where the line had to name one and did
    not.
    """
    return (url or "") if rules.endpoint == MIXED else rules.endpoint


def prompt_of(body: Body, path: str) -> bytes:
    """Return the part of a body that the model reads, as it was sent; empty where it is missing."""
    try:
        return bytes(_prompt_of(body, endpoint_of(path))[1])
    except BodyFault:
        return b""


def check_line(line: bytes, rules: LineRules, *, utf8_known: bool = False) -> InputLine:
    """Return what ingest needs of a good line.

    Raise BodyFault where only a parameter of the body is wrong, and LineFault for any other fault.
    """
    try:
        return _checked(line, rules, utf8_known)
    except BodyFault as fault:
        # A fault that fails the whole batch is reported before one that fails only its line.
        request = _check_around_body(line, rules)
        fault.custom_id, fault.model = request.custom_id, _model_of(request, line, path_of(request.url, rules))
        raise


def _checked(line: bytes, rules: LineRules, utf8_known: bool) -> InputLine:
    if len(line) - line.endswith(b"\r") > rules.line_bytes_max:
        raise too_long(rules.line_bytes_max)
    check_depth(line, rules.depth_max)
    if not (utf8_known or is_utf8(line)):
        explain(line)
    try:
        request = decode_request(line)
    except (ValueError, RecursionError):
        explain(line, needs_model=rules.endpoint not in (*DEFAULT_MODELS, MIXED))
    body, path = request.body, path_of(request.url, rules)
    model = _model_of(request, line, path)
    endpoint = endpoint_of(path)
    # Check the url first: complaints about a body meant for another endpoint would not help its
    # author.
    _check_url(request.url, rules)
    key, prompt = _prompt_of(body, endpoint)
    at = _locate(line, key, prompt)
    _check_frame(line[:at] + line[at + len(prompt) :], line, rules.body_keys_max)
    _check_request(request, model, rules)
    if body.stream:
        raise _streams()
    input_count = _check_prompt(prompt, endpoint)
    _check_numbers(body, rules)
    if path == "/v1/responses" and bytes(body.background) not in (b"", b"false", b"null"):
        message = "body.background must be false: a batch is answered in the background anyway."
        raise BodyFault("unsupported_parameter", message, "body.background")
    if path == "/v1/chat/completions":
        _check_tools(body.tools)
    output = 0
    if endpoint.generates:
        asked = body.max_completion_tokens or body.max_output_tokens or body.max_tokens
        default, most = rules.default_output_tokens, rules.max_tokens_max
        output = estimate.output_tokens(asked, body.n or 1, default_tokens=default, tokens_max=most)
    fixed = bytes(body.tools) + bytes(body.instructions) + bytes(body.system)
    if endpoint.prompt is None:
        # The text that each document, or the second text, is compared with.
        fixed += b"".join(map(bytes, (body.query, body.text_1, body.queries, body.data_1)))
    counted = input_count if endpoint.counts_inputs else 0
    return InputLine(request.custom_id, model, path, key, at, len(prompt), fixed, output, counted)


def too_long(line_bytes_max: int) -> LineFault:
    message = (
        f"This line is longer than {line_bytes_max} bytes: split the request, or ask the operator for a higher limit."
    )
    return LineFault("line_too_long", message)


def check_depth(line: bytes, depth_max: int) -> None:
    """Refuse deep nesting before any parser sees it."""
    if is_deeper_than(line, depth_max):
        message = f"This line is nested deeper than {depth_max} levels: flatten it."
        raise LineFault("invalid_json_line", message)


def _prompt_of(body: Body, endpoint: Endpoint) -> tuple[str, Raw]:
    """Return the key and the raw value of what the model reads; both are empty where an unknown
    endpoint has none.
    """
    if endpoint.prompt is not None:
        prompt: Raw = getattr(body, endpoint.prompt)
        if not prompt or prompt == Raw(b"null"):
            message = f"Requests to this endpoint need body.{endpoint.prompt}: add it."
            raise BodyFault("missing_required_parameter", message, f"body.{endpoint.prompt}")
        return endpoint.prompt, prompt
    for key in ("messages", "input", "prompt", "documents", "text_2", "items", "data_2"):
        if value := getattr(body, key):
            return key, value
    return "", NOTHING


def _locate(line: bytes, key: str, prompt: Raw) -> int:
    """Return where the prompt's bytes begin in the line.

    Equal bytes elsewhere will do: only their content is compared.
    """
    if not prompt:
        return len(line)
    at = line.find(b'"%s"' % key.encode()) + len(key) + 2
    while line[at : at + 1] in (b":", b" "):
        at += 1
    return at if line.startswith(prompt, at) else line.find(prompt)


def _check_frame(frame: bytes, line: bytes, body_keys_max: int) -> None:
    """Look for faults that a typed decode accepts: keys named twice, numbers that are not finite,
    too many keys.
    """
    named = [text for text in frame.split(b'"') if text in _READ_KEYS]
    if (
        len(set(named)) < len(named)
        or frame.count(b":") > body_keys_max
        or _ESCAPED_LETTER.search(frame)
        or _ODD_NUMBER.search(frame)
    ):
        check_exactly(line, body_keys_max)


def _model_of(request: "LineRequest | _LooseRequest", line: bytes, path: str) -> str:
    """Return the model that a line names, or else the default model of its endpoint."""
    model = request.body.model
    if model is None:
        model = DEFAULT_MODELS.get(path)
    if model is None:
        explain(line)
    return model


def _check_request(request: "LineRequest | _LooseRequest", model: str, rules: LineRules) -> None:
    custom_id = request.custom_id
    if not custom_id or len(custom_id.encode()) > rules.custom_id_bytes_max or not custom_id.isprintable():
        most = rules.custom_id_bytes_max
        message = f"custom_id must be 1 to {most} bytes of printable text, without control characters."
        raise LineFault("invalid_custom_id", message, "custom_id")
    if request.method is not None and request.method != "POST":
        raise LineFault("invalid_method", 'Only POST can be sent: set "method" to "POST" or leave it out.', "method")
    if not model or len(model.encode()) > MODEL_BYTES_MAX or not model.isprintable():
        message = f"body.model must be 1 to {MODEL_BYTES_MAX} bytes of printable text: name a model of this server."
        raise LineFault("invalid_request", message, "body.model")
    if rules.models is not None and model not in rules.models:
        message = f"This key does not allow the model {shown(model)}: name one that it allows, or use another key."
        raise LineFault("model_not_found", message, "body.model")


def _streams() -> LineFault:
    message = 'A batch cannot stream: remove "stream" or set it to false.'
    return LineFault("unsupported_parameter", message, "body.stream")


def _check_url(url: str | None, rules: LineRules) -> None:
    if rules.endpoint == MIXED:
        if url is None or not url.startswith("/"):
            message = "Every line of this batch must name its endpoint: add a url like /v1/chat/completions."
            raise LineFault("url_mismatch", message, "url")
    elif url is not None and url != rules.endpoint:
        message = f"The batch is for {rules.endpoint}, but this line names {shown(url)}: make the two agree."
        raise LineFault("url_mismatch", message, "url")


def _check_around_body(line: bytes, rules: LineRules) -> "_LooseRequest":
    """Look for faults that fail the whole batch in a line that has a wrong parameter."""
    request = _decode_loosely(line)
    _check_url(request.url, rules)
    check_exactly(line, len(line))
    path = path_of(request.url, rules)
    _check_request(request, _model_of(request, line, path), rules)
    if request.body.stream == Raw(b"true"):
        raise _streams()
    if path == "/v1/chat/completions":
        with suppress(BodyFault):
            _check_tools(request.body.tools)
    return request


def _check_prompt(prompt: Raw, endpoint: Endpoint) -> int:
    """Return the number of inputs in a prompt: 1, except for arrays of embedding inputs."""
    if endpoint.prompt is None:
        return 1
    param = f"body.{endpoint.prompt}"
    text = bytes(prompt)
    if endpoint.has_messages and not re.match(rb"\[\s*\{", text):
        raise BodyFault("invalid_request", f"{param} must be an array with at least one message object.", param)
    if text[0] not in b'["':
        raise BodyFault("invalid_request", f"{param} must be a string or an array.", param)
    if endpoint.has_messages or text[0] == 0x22:
        return 1
    parts = _decode_list(text)
    if not parts:
        raise BodyFault("invalid_request", f"{param} is an empty array: give it at least one element.", param)
    if _ODD_NUMBER.search(text) and not any(bytes(part).startswith((b'"', b"{")) for part in parts):
        check_exactly(b'{"input":%b}' % text, 1)
    # An array of numbers is one input, given as token ids.
    return 1 if bytes(parts[0])[0] in b"-0123456789" else len(parts)


def _check_numbers(body: Body, rules: LineRules) -> None:
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        asked = getattr(body, key)
        if asked is not None and not 0 < asked <= rules.max_tokens_max:
            message = f"body.{key} must be a whole number from 1 to {rules.max_tokens_max}."
            raise BodyFault("invalid_request", message, f"body.{key}")
    if body.n is not None and not 0 < body.n <= CHOICES_MAX:
        raise BodyFault("invalid_request", f"body.n must be a whole number from 1 to {CHOICES_MAX}.", "body.n")


def _check_tools(tools: Raw) -> None:
    if not tools:
        return
    try:
        kinds = _decode_tools(tools)
    except msgspec.ValidationError:
        raise BodyFault("invalid_request", "body.tools must be an array of tool objects.", "body.tools") from None
    if any(tool.type == "mcp" for tool in kinds or ()):
        message = "A chat batch cannot call MCP servers: remove the tools of type mcp."
        raise LineFault("unsupported_parameter", message, "body.tools")
