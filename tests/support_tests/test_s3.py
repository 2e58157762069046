"""The S3 server of the test run does what the product asks of one, through the product's own client library."""

from __future__ import annotations

import secrets

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from tests.support.s3 import S3Failed, S3Server


@pytest.fixture
def store(s3_server: S3Server, s3_bucket: str) -> S3Store:
    return s3_server.store(s3_bucket)


def test_put_get_head_range_list_delete(store: S3Store) -> None:
    body = secrets.token_bytes(100_000)
    obstore.put(store, "folder/one", body)
    obstore.put(store, "folder/two", b"2")
    assert bytes(obstore.get(store, "folder/one").bytes()) == body
    assert obstore.head(store, "folder/one")["size"] == len(body)
    assert bytes(obstore.get_range(store, "folder/one", start=10, end=2_000)) == body[10:2_000]
    listed = [entry["path"] for page in obstore.list(store, "folder") for entry in page]
    assert sorted(listed) == ["folder/one", "folder/two"]
    obstore.delete(store, "folder/one")
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "folder/one")


async def test_a_multipart_upload_arrives_whole(store: S3Store) -> None:
    body = secrets.token_bytes(12 * 1024 * 1024 + 17)
    await obstore.put_async(store, "large", body, use_multipart=True, chunk_size=5 * 1024 * 1024)
    answer = await obstore.get_async(store, "large")
    assert bytes(await answer.bytes_async()) == body


def test_a_name_can_be_taken_only_once_when_asked(store: S3Store) -> None:
    obstore.put(store, "name", b"first", mode="create", use_multipart=False)
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "name", b"second", mode="create", use_multipart=False)
    assert bytes(obstore.get(store, "name").bytes()) == b"first"


def test_a_missing_bucket_is_not_made_by_writing_to_it(s3_server: S3Server) -> None:
    with pytest.raises(FileNotFoundError):
        obstore.put(s3_server.store(f"t-{secrets.token_hex(8)}"), "key", b"body")


def test_wrong_credentials_are_refused(s3_server: S3Server, s3_bucket: str) -> None:
    unknown = S3Store(
        s3_bucket,
        endpoint=s3_server.endpoint,
        region=s3_server.region,
        access_key_id=s3_server.access_key,
        secret_access_key="wrong",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    with pytest.raises((PermissionDeniedError, UnauthenticatedError)):
        obstore.put(unknown, "key", b"body")


def test_a_stopped_server_is_gone_and_comes_back_with_its_data(private_s3_server: S3Server) -> None:
    bucket = private_s3_server.create_bucket()
    obstore.put(private_s3_server.store(bucket), "key", b"body")
    private_s3_server.stop()
    private_s3_server.stop()
    with pytest.raises(S3Failed):
        private_s3_server.create_bucket()
    private_s3_server.start()
    assert bytes(obstore.get(private_s3_server.store(bucket), "key").bytes()) == b"body"
