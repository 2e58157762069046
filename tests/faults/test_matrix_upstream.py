"""Rows 31 to 41 of the fault matrix: every way in which an upstream fails, on real processes, with its own log as the witness."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.matrix import ATTEMPTS_MAX, READ_TIMEOUT_S, RETRY_AFTER_MAX_MS, Case, Matrix, says
from tests.support.processes import Processes, wait_until
from tests.support.tidegate import END_S, behaving, requests
from tests.upstream.raw_server import Peer, Request, Script
from tests.web.upstream import answers

BROKEN = "invalid_upstream_response"
AMBIGUOUS = "upstream_ambiguous"
# A fault that wears off after so many calls of its item is written with x and their number.
THROTTLED = [
    Case("429:ra=0.05x5", 6),
    Case("429x1", 2),
    Case("429:ra=1x1", 2),
    Case("429:ra=datex1", 2),
    Case("429:ra=1000000000x1", 2),
    Case("429:ra=-5x1", 2),
    Case("429:ra=soonx1", 2),
]
FAILING = (500, 502, 503, 504, 529, 408, 425)
AMBIGUOUS_CASES = [Case(f"{status}x2", ATTEMPTS_MAX) for status in FAILING]
GIVEN_UP = [Case(f"{status}", ATTEMPTS_MAX, str(status)) for status in (500, 503, 408)]
REFUSED = [Case(f"{status}", 1, str(status)) for status in (400, 404, 413, 422)]
SILENT = [Case("hangx1", 2), Case("hang_bodyx1", 2)]
SLOW = [Case("slowloris", ATTEMPTS_MAX, AMBIGUOUS)]
CUT = [Case(f"{fault}x1", 2) for fault in ("reset", "reset_before", "half", "longlength", "badgzip")]
GARBAGE = ("malformed", "html", "empty", "null", "nochoices", "error200")
GARBAGE_CASES = [Case(f"{fault}x1", 2) for fault in GARBAGE] + [Case(fault, 2, BROKEN) for fault in GARBAGE]
LARGE = [Case("huge=3000000", 2, BROKEN), Case("bomb=300000000", 2, BROKEN)]
REDIRECT = [Case("redirect", 1, "307")]
CASES = [
    *THROTTLED, *AMBIGUOUS_CASES, *GIVEN_UP, *REFUSED, *SILENT, *SLOW, *CUT, *GARBAGE_CASES, *LARGE, *REDIRECT,
]  # fmt: skip
MEMORY_BYTES_MAX = 128 << 20


async def floods_headers(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\n")
    try:
        for number in range(1_000_000):
            await peer.send(b"X-%d: %s\r\n" % (number, b"y" * 1_000))
    except ConnectionError:
        return


async def never_ends(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n" + b'{"choices":[{"text":"')
    try:
        for _ in range(1_024):
            await peer.send(b"x" * (1 << 20))
    except ConnectionError:
        return


async def floods_early_hints(request: Request, peer: Peer) -> None:
    try:
        for _ in range(1_000_000):
            await peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 16)
    except ConnectionError:
        return


async def is_chunked_without_end(request: Request, peer: Peer) -> None:
    await peer.send(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{"choices":[{}]}\r\n')
    peer.close()


def embeds(spoil: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Script:
    """Each text's embedding is its number; an answer to several is spoiled, one to one is right."""

    async def script(request: Request, peer: Peer) -> None:
        given = json.loads(request.body).get("input", []) if request.body else []
        texts = given if isinstance(given, list) else [given]
        data = [{"object": "embedding", "index": at, "embedding": [float(text)]} for at, text in enumerate(texts)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        spoiled = spoil(data) if len(texts) > 1 else data
        await peer.answer(200, json.dumps({"object": "list", "model": "m", "data": spoiled, "usage": usage}).encode())

    return script


GROUPS: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "reordered": lambda data: data[::-1],
    "missing": lambda data: data[:-1],
    "extra": lambda data: [*data, {**data[0], "index": len(data)}],
    "twice": lambda data: [data[0], *data[:-1]],
}
SCRIPTS = {
    **{f"group {name}": embeds(spoil) for name, spoil in GROUPS.items()},
    "nan": answers(b'{"choices":[{"logprob":NaN}]}'),
    "twice": answers(b'{"choices":[{}],"choices":[{"text":"other"}]}'),
    "number": answers(b'{"choices":[{}],"x":%b}' % (b"7" * 5_000)),
    "status": answers(b"{}", 999),
    "headers": floods_headers,
    "gigabyte": never_ends,
    "hints": floods_early_hints,
    "chunked": is_chunked_without_end,
}
MODELS = {
    **{
        f"group {name}": {"url": "SCRIPT", "max_in_flight": 2, "tide": "off", "upstream_max_batch_inputs": 4}
        for name in GROUPS
    },
    "refused": {"url": "http://PROXY/v1"},
    "unresolved": {"url": "http://no-such-host.invalid/v1"},
    "cut": {"url": "http://PROXY/v1"},
    "kept alive": {"url": "http://PROXY/v1"},
    "short total": {"url": "http://ENGINE/v1", "read_timeout_s": 300, "total_timeout_s": 2.0},
    "key 401": {"url": "http://ENGINE/v1"},
    "key 403": {"url": "http://ENGINE/v1"},
}


@pytest.fixture(scope="module")
def matrix(module_processes: Processes, module_directory: Path) -> Iterator[Matrix]:
    made = Matrix(module_processes, module_directory, CASES, SCRIPTS, MODELS)
    yield made
    made.close()


def test_31_throttling_uses_up_no_attempt_and_no_call_comes_before_its_time(matrix: Matrix) -> None:
    calls = matrix.check(THROTTLED)
    for fault, wait_s in (("429:ra=1x1", 1.0), ("429:ra=1000000000x1", RETRY_AFTER_MAX_MS / 1000)):
        last = max(call["at"] for call in calls[fault] if call["status"] == 429)
        again = [call["at"] for call in calls[fault] if "fault" not in call and call["at"] > last]
        # What was in flight beside it may come in while the 429 is on its way back; its own next try may not.
        assert max(again) - last >= wait_s, fault


def test_32_server_errors_are_tried_three_times(matrix: Matrix) -> None:
    matrix.check([*AMBIGUOUS_CASES, *GIVEN_UP])


def test_33_refusals_are_final_and_cost_one_call(matrix: Matrix) -> None:
    matrix.check(REFUSED)


@pytest.mark.parametrize("status", [401, 403])
def test_33_a_rejected_key_of_ours_fails_no_item(matrix: Matrix, status: int) -> None:
    lines = requests(12, lambda number: f"{number} {behaving(str(status))}", f"key {status}")
    batch_id = matrix.site.submit(lines)
    matrix.proc.wait_for_line(f"upstream_key_rejected.*key {status}")
    assert matrix.site.batch(batch_id)["request_counts"]["failed"] == 0
    matrix.site.cancel(batch_id)
    assert matrix.site.judge(batch_id, lines, "cancelled").error_codes() == {"batch_cancelled": 12}


def test_34_a_refused_connection_is_tried_again_and_costs_nothing(matrix: Matrix) -> None:
    lines = requests(8, model="refused")
    matrix.proxies["refused"].refuse()
    batch_id = matrix.site.submit(lines)
    matrix.proc.wait_for_line("upstream_circuit_opened.*refused/1")
    assert matrix.site.batch(batch_id)["request_counts"]["failed"] == 0
    matrix.proxies["refused"].heal()
    assert matrix.site.judge(batch_id, lines).errors == []


@pytest.mark.parametrize("model", ["unresolved", "tls"])
def test_34_a_name_or_certificate_that_is_wrong_fails_no_item(matrix: Matrix, model: str) -> None:
    lines = requests(8, model=model)
    batch_id = matrix.site.submit(lines)
    matrix.proc.wait_for_line(f"upstream_circuit_opened.*{model}/1")
    matrix.site.cancel(batch_id)
    assert matrix.site.judge(batch_id, lines, "cancelled").error_codes() == {"batch_cancelled": 8}
    assert matrix.site.calls_of(batch_id) == []


def test_35_a_silent_upstream_is_given_up_while_the_heart_beats(matrix: Matrix) -> None:
    began = time.monotonic()
    matrix.check(SILENT)
    assert time.monotonic() - began >= READ_TIMEOUT_S, "it is waited for longer than a lease"
    assert matrix.no_worker_was_lost()


def test_35_the_total_deadline_ends_a_call_however_long_silence_is_allowed(matrix: Matrix) -> None:
    lines = requests(2, lambda number: behaving("hangx1") if number else "say 0", "short total")
    batch_id = matrix.site.submit(lines)
    assert matrix.site.judge(batch_id, lines, repeats_max=2).errors == []


def test_36_a_slow_loris_is_cut_by_the_rate_rule(matrix: Matrix) -> None:
    matrix.check(SLOW)


def test_37_what_is_cut_short_or_garbled_is_never_an_answer(matrix: Matrix) -> None:
    matrix.check(CUT)


def test_37_a_body_that_the_network_cuts_or_that_never_ends_is_never_an_answer(matrix: Matrix) -> None:
    # The head passes, and a part of the body.
    matrix.proxies["cut"].cut(250, "down")
    lines = requests(1, model="cut")
    batch_id = matrix.site.submit(lines)
    matrix.fails("chunked", AMBIGUOUS, ATTEMPTS_MAX)
    assert says(matrix.site.judge(batch_id, lines, repeats_max=ATTEMPTS_MAX - 1)) == {"c0": AMBIGUOUS}
    assert len(matrix.site.calls_of(batch_id)) == ATTEMPTS_MAX


def test_38_what_is_no_answer_is_tried_once_more_and_fails_its_item(matrix: Matrix) -> None:
    matrix.check(GARBAGE_CASES)


@pytest.mark.parametrize("model", ["nan", "twice", "number", "status"])
def test_38_json_that_readers_disagree_about_is_no_answer_and_is_kept(matrix: Matrix, model: str) -> None:
    assert matrix.fails(model, BROKEN, 2)["tidegate"]["raw"]


def test_39_answers_without_measure_are_cut_in_bounded_memory(matrix: Matrix) -> None:
    before = matrix.proc.memory_peak_bytes()
    matrix.check(LARGE)
    matrix.fails("headers", AMBIGUOUS, ATTEMPTS_MAX)
    matrix.fails("gigabyte", BROKEN, 2)
    assert matrix.proc.memory_peak_bytes() - before < MEMORY_BYTES_MAX


def test_40_a_redirect_is_refused_and_not_followed(matrix: Matrix) -> None:
    matrix.check(REDIRECT)
    assert not [call for call in matrix.engine.calls() if "redirected" in call["path"]]


def test_40_a_flood_of_early_hints_ends(matrix: Matrix) -> None:
    matrix.fails("hints", AMBIGUOUS, ATTEMPTS_MAX)


def test_40_connections_that_were_closed_while_idle_repeat_no_call(matrix: Matrix) -> None:
    lines = requests(6, model="kept alive")
    proxy = matrix.proxies["kept alive"]
    for close in (proxy.close_links, proxy.reset):
        assert matrix.site.judge(matrix.site.submit(lines), lines).errors == []
        close()
        wait_until(lambda: proxy.links == 0, END_S, "every connection to be closed")
    assert matrix.site.judge(matrix.site.submit(lines), lines).errors == []


def test_41_items_of_a_group_get_their_own_part_of_an_answer_or_are_asked_for_again_alone(matrix: Matrix) -> None:
    count = 16
    lines = [
        json.dumps(
            {
                "custom_id": f"{name} {number}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": f"group {name}", "input": str(number)},
            }
        )
        for name in GROUPS
        for number in range(count)
    ]
    batch_id = matrix.site.submit(lines, endpoint="/v1/embeddings")
    results = matrix.site.judge(batch_id, lines, witnessed=False)
    assert results.errors == []
    for line in results.output:
        number = float(line["custom_id"].rpartition(" ")[2])
        assert [one["embedding"] for one in line["response"]["body"]["data"]] == [[number]], line["custom_id"]
    sizes = {
        name: [len(asked) if isinstance(asked, list) else 1 for asked in _inputs(matrix, f"group {name}")]
        for name in GROUPS
    }
    assert all(max(found) > 1 for found in sizes.values()), "groups were tried"
    assert sum(sizes["reordered"]) == count, "in whatever order, each part names its item"


def _inputs(matrix: Matrix, model: str) -> list[Any]:
    return [json.loads(request.body)["input"] for request in matrix.posts(model)]
