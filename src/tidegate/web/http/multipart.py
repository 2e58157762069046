"""The parser of an upload's multipart body.

Piece by piece, it passes the file's bytes on unchanged and collects the fields.

The body must have exactly one file and may have known fields, in any order, each at most once and
of bounded size. Unknown parts are ignored, because clients send fields of their own. This module
neither reads from the network nor writes anywhere.
"""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from tidegate.core.errors import ApiProblem
from tidegate.web.http.filename import file_name, split_parameters

PARTS_MAX = 32
HEADER_COUNT_MAX = 8
HEADER_BYTES_MAX = 4_096
FIELD_BYTES_MAX = 1_024
BOUNDARY_BYTES_MAX = 200
OVERHEAD_BYTES_MAX = PARTS_MAX * (HEADER_COUNT_MAX * HEADER_BYTES_MAX + FIELD_BYTES_MAX)
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_PLAIN_ENCODINGS = (b"7bit", b"8bit", b"binary", b"")


class FileBegins:
    """The mark that the file's first byte comes next."""


FILE_BEGINS = FileBegins()


class UploadForm:
    def __init__(self, content_type: str | None, file_field: str = "file", fields: tuple[str, ...] = FIELDS) -> None:
        """Take the bytes from the part named `file_field`, and keep the values of the parts named
        in `fields`.
        """
        self.file_field = file_field
        self._known_fields = fields
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_complete = False
        self._out: list[FileBegins | bytes] = []
        self._part_count = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None
        self._field_value = bytearray()
        self._is_ignored = False
        self._parser = MultipartParser(
            _boundary(content_type, file_field),
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_count=HEADER_COUNT_MAX,
            max_header_size=HEADER_BYTES_MAX,
        )

    def feed(self, data: bytes) -> list[FileBegins | bytes]:
        """Parse these bytes of the body; return what they contain of the file."""
        self._out = []
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(str(error)) from None
        return self._out

    def finish(self) -> str:
        """Return the file's name at the end of the body; refuse a body that is incomplete or has no
        file.
        """
        if not self.is_complete:
            raise _broken("it ended before its closing boundary")
        if self.filename is None:
            raise ApiProblem(
                400, "missing_file", f"The body has no part named `{self.file_field}`.", param=self.file_field
            )
        return self.filename

    def _on_part_begin(self) -> None:
        self._part_count += 1
        if self._part_count > PARTS_MAX:
            raise _broken(f"it has more than {PARTS_MAX} parts")
        self._headers = {}
        self._field = None
        self._is_ignored = False

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers.setdefault(bytes(self._header_name).lower(), bytes(self._header_value))
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        if self._headers.get(b"content-transfer-encoding", b"").strip().lower() not in _PLAIN_ENCODINGS:
            raise _broken("a part has a Content-Transfer-Encoding; send the bytes as they are")
        word, parameters = split_parameters(self._headers.get(b"content-disposition", b""))
        name = parameters.get(b"name", b"").decode("utf-8", "replace")
        if word != b"form-data" or not name:
            raise _broken("a part has no name")
        if name == self.file_field:
            if self.filename is not None:
                raise ApiProblem(400, "too_many_files", f"The body has two parts named `{name}`; send one.", param=name)
            self.filename = file_name(parameters)
            self._out.append(FILE_BEGINS)
            return
        if name not in self._known_fields:
            self._is_ignored = True
            return
        if name in self.fields:
            raise ApiProblem(400, "duplicate_parameter", f"The field `{name}` came twice.", param=name)
        self._field = name
        self._field_value.clear()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_ignored:
            return
        if self._field is None:
            self._out.append(data[start:end])
            return
        self._field_value += data[start:end]
        if len(self._field_value) > FIELD_BYTES_MAX:
            raise ApiProblem(
                400, "invalid_parameter", f"The field is longer than {FIELD_BYTES_MAX:,} bytes.", param=self._field
            )

    def _on_part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._field_value.decode("utf-8", "replace")
            self._field = None

    def _on_end(self) -> None:
        self.is_complete = True


def _boundary(content_type: str | None, file_field: str) -> bytes:
    word, parameters = split_parameters((content_type or "").encode("latin-1", "replace"))
    if word != b"multipart/form-data":
        raise ApiProblem(
            415,
            "unsupported_media_type",
            f"Send the bytes as multipart/form-data, in a part named `{file_field}`, for example: curl -F {file_field}=@requests.jsonl"
            f"{' -F purpose=batch' if file_field == 'file' else ''}.",
            param="Content-Type",
        )
    boundary = parameters.get(b"boundary", b"")
    if not 0 < len(boundary) <= BOUNDARY_BYTES_MAX or b"\r" in boundary or b"\n" in boundary:
        raise _broken("its Content-Type names no usable boundary")
    return boundary


def _broken(why: str) -> ApiProblem:
    return ApiProblem(400, "invalid_multipart", f"The multipart body cannot be read: {why}.", param="file")
