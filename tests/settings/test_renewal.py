"""Keys in files, read again when the files change: also while the program that replaces one is half done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.settings.conftest import load_text
from tidegate.core.deployments import Deployment, Queue, Secret, Serves
from tidegate.core.errors import SettingsError
from tidegate.settings import deployments
from tidegate.settings.renewal import Renewal


def test_a_key_in_a_file_is_read_again_when_the_file_changes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first\n")
    text = f"models: {{m: {{deployments: [{{url: 'http://h/v1', api_key: 'file:{key}'}}]}}}}"
    (one,) = deployments(load_text(tmp_path, text).settings)
    renewal = Renewal({})
    assert renewal.renewed(one) == one
    assert not renewal.has_news()
    key.write_text("the-second\n")
    assert renewal.has_news()
    renewal.begin_renewal()
    assert renewal.renewed(one).api_key == Secret("the-second")
    assert not renewal.has_news()


def test_another_file_of_the_same_size_and_age_is_another(tmp_path: Path) -> None:
    """Replace it by renaming, within one tick of the clock."""
    key, new = tmp_path / "key", tmp_path / "new"
    key.write_text("one")
    new.write_text("two")
    stamp = key.stat()
    os.utime(new, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    renewal = Renewal({})
    assert renewal.secret(f"file:{key}") == Secret("one")
    new.rename(key)
    assert renewal.has_news()
    assert renewal.secret(f"file:{key}") == Secret("two")


@pytest.mark.parametrize(
    "broken", [None, b"", b"two\nlines", b"two words", b"\xff\xfe", "k\u00e9y".encode(), b"x" * 5_000]
)
def test_a_file_that_is_being_replaced_changes_nothing_and_is_looked_at_again(
    tmp_path: Path, broken: bytes | None
) -> None:
    key = tmp_path / "key"
    key.write_text("first")
    renewal = Renewal({})
    reference = f"file:{key}"
    assert renewal.secret(reference) == Secret("first")
    if broken is None:
        key.unlink()
    else:
        key.write_bytes(broken)
    for _ in range(2):
        assert renewal.has_news()
        renewal.begin_renewal()
        assert renewal.secret(reference) == Secret("first")
        assert list(renewal.troubles) == [reference]
    key.write_text("second")
    renewal.begin_renewal()
    assert (renewal.secret(reference), renewal.troubles, renewal.has_news()) == (Secret("second"), {}, False)


def test_one_that_was_never_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Renewal({}).secret(f"file:{tmp_path / 'none'}")
    before = Secret("known at the start", f"file:{tmp_path / 'none'}")
    assert Renewal({}).secret(before.source, before) == before


def test_what_is_in_no_file_stays_as_it_is(tmp_path: Path) -> None:
    one = Deployment("d", "http://h/v1", api_key=Secret("literal"))
    renewal = Renewal({"KEY": "k"})
    assert renewal.renewed(one) == one
    assert renewal.secret("env:KEY") == Secret("k")
    assert not renewal.has_news()


def test_the_address_of_a_queue_may_lie_in_a_file_too(tmp_path: Path) -> None:
    place = tmp_path / "url"
    place.write_text("redis://one")
    queue = Queue(Secret("redis://one", f"file:{place}"), "requests", "results")
    one = Deployment("d", "http://h/v1", serves=Serves.BATCH, queue=queue)
    renewal = Renewal({})
    assert renewal.renewed(one) == one
    place.write_text("redis://another")
    assert renewal.renewed(one) == replace(one, queue=replace(queue, url=Secret("redis://another")))
