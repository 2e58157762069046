"""What an operator writes about a queue, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.settings.conftest import load_text
from tidegate.core.deployments import Deployment, Serves, TideMode
from tidegate.core.errors import SettingsError
from tidegate.settings import deployments

QUEUE = "queue: {url: 'redis://h:6379/0'}"


def loaded(tmp_path: Path, deployment: str) -> tuple[Deployment, tuple[str, ...]]:
    text = f"models:\n  org/m:\n    deployments:\n      - {{url: 'http://h/v1', {deployment}}}\n"
    found = load_text(tmp_path, text, {"QUEUE_URL": "rediss://:canary@h:6379/0"})
    (one,) = deployments(found.settings)
    return one, found.warnings


def test_a_queue_is_named_as_llm_d_names_it(tmp_path: Path) -> None:
    one, warnings = loaded(tmp_path, QUEUE)
    assert one.queue is not None
    assert one.queue.requests == "llm-d-async:requests:org/m"
    assert one.queue.results == "llm-d-async:results:org/m:tidegate"
    assert not [text for text in warnings if "queue" in text]
    one, _ = loaded(tmp_path, "queue: {url: 'redis://h/0', pool: p, results: mine}")
    assert one.queue is not None
    assert (one.queue.requests, one.queue.results) == ("llm-d-async:requests:p", "mine")


def test_a_queue_takes_batch_work_alone_at_its_own_pace(tmp_path: Path) -> None:
    one, _ = loaded(tmp_path, "engine: vllm, total_timeout_s: 60, queue: {url: 'redis://h/0', timeout_s: 7200}")
    assert (one.serves, one.tide, one.is_capacity_known) == (Serves.BATCH, TideMode.OFF, True)
    assert one.total_timeout_s == 7200


def test_a_password_is_a_secret_and_is_shown_nowhere(tmp_path: Path) -> None:
    one, warnings = loaded(tmp_path, "queue: {url: 'env:QUEUE_URL'}")
    assert one.queue is not None
    assert one.queue.url.reveal() == "rediss://:canary@h:6379/0"
    assert "canary" not in repr(one)
    assert not [text for text in warnings if "queue" in text]
    _, warnings = loaded(tmp_path, "queue: {url: 'redis://:canary@h/0'}")
    assert [text for text in warnings if "queue.url" in text]
    assert "canary" not in " ".join(warnings)


WRONG = {
    "queue: {pool: p}": "url",
    "queue: {url: 'http://h'}": "redis://",
    "queue: {url: 'redis://h', requests: a, results: a}": "a name of its own",
    "queue: {url: 'redis://h', timeout_s: 0}": "timeout_s",
    "queue: {url: 'redis://h', poll: p}": "pool",
    f"serves: interactive, {QUEUE}": "serves: batch",
    f"api_key: k, {QUEUE}": "api_key",
    f"upstream_max_batch_inputs: 8, {QUEUE}": "not grouped",
}


@pytest.mark.parametrize("deployment", WRONG)
def test_what_cannot_be_is_refused_in_words(tmp_path: Path, deployment: str) -> None:
    with pytest.raises(SettingsError, match=WRONG[deployment]):
        loaded(tmp_path, deployment)
