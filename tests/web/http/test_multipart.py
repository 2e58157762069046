"""The body of an upload: one file, each field once, and a bound on everything about them."""

from __future__ import annotations

import pytest

from tidegate.core.errors import ApiProblem
from tidegate.web.http.multipart import FILE_BEGINS, FileBegins, UploadForm

KIND = "multipart/form-data; boundary=XX"
FILE = 'name="file"; filename="a.jsonl"'
PURPOSE = 'name="purpose"'


def part(disposition: str, content: str = "batch", *headers: str) -> str:
    head = "".join(f"{one}\r\n" for one in (f"Content-Disposition: form-data; {disposition}", *headers))
    return f"--XX\r\n{head}\r\n{content}\r\n"


def read(*parts: str, kind: str = KIND, end: str = "--XX--\r\n") -> tuple[UploadForm, list[FileBegins | bytes]]:
    form = UploadForm(kind)
    found = form.feed(("".join(parts) + end).encode())
    form.finish()
    return form, found


def refused(*parts: str, kind: str = KIND, end: str = "--XX--\r\n") -> tuple[int, str, str | None]:
    with pytest.raises(ApiProblem) as problem:
        read(*parts, kind=kind, end=end)
    return problem.value.status, problem.value.code, problem.value.param


def test_a_file_and_its_fields_come_in_any_order_and_unknown_parts_are_ignored() -> None:
    for parts in (
        (part(FILE, "{}"), part(PURPOSE)),
        (part('name="other"', "x" * 5_000), part(PURPOSE), part(FILE, "{}")),
    ):
        form, found = read(*parts)
        assert (form.filename, form.fields) == ("a.jsonl", {"purpose": "batch"})
        assert found[0] is FILE_BEGINS
        assert b"".join(one for one in found[1:] if isinstance(one, bytes)) == b"{}"


def test_a_second_file_or_field_is_refused_by_name() -> None:
    assert refused(part(FILE, "{}"), part(FILE, "{}")) == (400, "too_many_files", "file")
    assert refused(part(FILE, "{}"), part(PURPOSE), part(PURPOSE)) == (400, "duplicate_parameter", "purpose")
    assert refused(part(PURPOSE)) == (400, "missing_file", "file")


def test_everything_has_a_bound() -> None:
    broken = (400, "invalid_multipart", "file")
    other = part('name="other"')
    assert read(*[other] * 31, part(FILE, "{}"))[0].filename == "a.jsonl"
    assert refused(*[other] * 32, part(FILE, "{}")) == broken
    assert read(part(FILE, "{}"), part(PURPOSE, "x" * 1_024))[0].fields == {"purpose": "x" * 1_024}
    assert refused(part(FILE, "{}"), part(PURPOSE, "x" * 1_025)) == (400, "invalid_parameter", "purpose")
    assert read(part(FILE, "{}", *(f"X-{n}: 1" for n in range(7))))[0].filename == "a.jsonl"
    assert refused(part(FILE, "{}", *(f"X-{n}: 1" for n in range(8)))) == broken
    assert refused(part(FILE, "{}", "X-Long: " + "x" * 4_096)) == broken


def test_a_part_that_is_not_whole_plain_or_named_is_refused() -> None:
    broken = (400, "invalid_multipart", "file")
    assert refused(part(FILE, "{}"), end="") == broken
    assert refused(part("nothing=x", "{}")) == broken
    for word, is_read in (("binary", True), ("8BIT", True), ("7bit", True), ("", True), ("base64", False)):
        encoded = part(FILE, "{}", f"Content-Transfer-Encoding: {word}")
        if is_read:
            assert read(encoded)[0].filename == "a.jsonl"
        else:
            assert refused(encoded) == broken


@pytest.mark.parametrize(
    ("boundary", "is_read"), [("X" * 200, True), ("X" * 201, False), ("", False), ('"X\rX"', False), ('"X\nX"', False)]
)
def test_a_boundary_is_short_and_on_one_line(boundary: str, is_read: bool) -> None:
    if is_read:
        assert not UploadForm(f"multipart/form-data; boundary={boundary}").is_complete
        return
    with pytest.raises(ApiProblem, match="boundary"):
        UploadForm(f"multipart/form-data; boundary={boundary}")
    assert refused(part(FILE, "{}"), kind="application/json") == (415, "unsupported_media_type", "Content-Type")
