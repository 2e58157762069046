"""Broken jobs: every rule of the judge is shown to fail, on damage of every kind that it is there for."""

from __future__ import annotations

import json

import pytest

from tests.judge.damage import (
    SLICE,
    Damage,
    add_call,
    after,
    another_item,
    asked_twice,
    attempt,
    blob,
    both,
    change_line,
    copied,
    copy_of_a_copy,
    cut_in_two,
    damages,
    file_of,
    foreign_id,
    forget_calls,
    job,
    last_item,
    later,
    lose_blob,
    move_to_output,
    other_hash,
    other_job,
    other_number,
    outcome,
    replace_call,
    reused,
    reworded,
    rewrite,
    rewrite_input,
    rewrite_merged,
    shared_twice,
    sql,
    swap,
    swap_custom_ids,
)
from tests.judge.world import JudgedWorld
from tidegate import judge
from tidegate.judge.report import EVIDENCE_COUNT_MAX

LINES = [
    *damages(
        "plain",
        ["items_once", "counts", "outcome_places"],
        {
            "a_line_removed": rewrite("output", lambda lines: lines[:4] + lines[5:]),
            "a_line_twice": rewrite("output", lambda lines: [*lines, lines[2]]),
        },
    ),
    *damages(
        "plain",
        ["items_once", "own_item"],
        {"wrong_custom_id": change_line("output", lambda line: line.update(custom_id="x"))},
    ),
    *damages("lenient", ["items_once"], {"a_bad_line_removed": rewrite("error", lambda lines: lines[1:])}),
    *damages("lenient", ["items_once"], {"a_bad_line_too_many": rewrite("error", lambda lines: [*lines, lines[0]])}),
    *damages("running", ["items_once"], {"a_growing_line_twice": rewrite("output", lambda lines: [*lines, lines[0]])}),
    *damages("plain", ["own_item"], {"answers_exchanged": rewrite("output", swap_custom_ids)}),
    *damages(
        "plain",
        ["lines_unchanged"],
        {
            "a_word_of_an_answer": change_line("output", reworded),
            "a_space_more": rewrite("output", lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]]),
        },
    ),
    *damages(
        "lenient",
        ["lines_unchanged"],
        {"the_words_of_a_refusal": change_line("error", lambda line: line["error"].update(message="No."), 0)},
    ),
    *damages(
        "retried",
        ["merged"],
        {
            "the_last_merged_answer_lost": rewrite_merged(lambda lines: lines[:-1]),
            "an_answer_of_the_first_twice": rewrite_merged(lambda lines: [lines[0], *lines]),
            "merged_answers_exchanged": rewrite_merged(lambda lines: [*lines[:-2], lines[-1], lines[-2]]),
        },
    ),
    *damages(
        "retried",
        ["items_once"],
        {
            "another_choice": job('retry_choice = \'{"outcomes":["failed"],"codes":[]}\''),
            "another_kind": job(
                'retry_choice = \'{"outcomes":["cancelled"],"codes":[],"kinds":["0123456789abcdef"]}\''
            ),
        },
    ),
    *damages(
        "deduplicated",
        ["copies"],
        {
            "a_copy_of_no_item": change_line("output", copied("batch_req_0000000000000000000000"), -1),
            "a_copy_that_says_otherwise": change_line("output", reworded, -1),
            "a_copy_of_a_copy": rewrite("output", copy_of_a_copy),
            "a_result_without_a_call": change_line("output", lambda line: line.pop("tidegate"), -1),
            "an_item_that_ran_as_a_copy": job("deduplicated_count = 2"),
            "a_temperature": rewrite_input(lambda text: text.replace(b'"temperature": 0', b'"temperature": 1')),
            "another_request": rewrite_input(lambda text: text.replace(b'"content": "a"', b'"content": "z"', 1)),
        },
    ),
    *damages(
        "deduplicated",
        ["line_shape"],
        {"a_copy_with_a_cost": change_line("output", lambda line: line["tidegate"].update(cost="1"), -1)},
    ),
    *damages(
        "reused",
        ["copies"],
        {
            "an_answer_of_no_job": change_line("output", reused("batch_req_0000000000000000000000"), -1),
            "an_answer_that_says_otherwise": change_line("output", reworded, -1),
            "a_request_that_was_changed": rewrite_input(lambda text: text.replace(b'hello p1"', b'hullo p1"', 1)),
            "more_reused_than_counted": both(job("reused_count = 19"), job("deduplicated_count = 1")),
        },
    ),
    *damages("deduplicated", ["copies"], {"a_copy_was_called": add_call(last_item)}, witness=True),
    *damages("canary", ["canary"], {"a_smaller_sample": job("canary_items = 2")}),
    *damages("ordered", ["item_order", "outcome_places"], {"order_lost": rewrite("output", swap)}),
    *damages(
        "ordered",
        ["parts"],
        {
            "a_part_too_large": job(
                """shape = '{"output_file_bytes_max":1024}', parts = replace(parts, '"output"', '"error"')"""
            ),
        },
    ),
    *damages(
        "ordered",
        ["parameters"],
        {
            "a_default_left_out": job("""shape = '{"defaults":{"absent":1}}'"""),
            "an_override_not_followed": job("""shape = '{"overrides":{"top_p":2}}'"""),
        },
    ),
    *damages(
        "plain",
        ["line_ids"],
        {
            "an_upstream_id": change_line("output", foreign_id),
            "an_id_of_another_job": change_line("output", other_job),
            "an_id_twice": change_line("output", other_number(7)),
            "an_id_past_the_end": change_line("output", other_number(25)),
        },
    ),
    *damages(
        "plain",
        ["line_shape"],
        {
            "a_key_too_many": change_line("output", lambda line: line.update(extra=1)),
            "a_key_too_few": change_line("output", lambda line: line.pop("error")),
            "no_body": change_line("output", lambda line: line["response"].update(body=[])),
            "a_status_in_words": change_line("output", lambda line: line["response"].update(status_code="200")),
            "an_upstream_request_id": change_line("output", lambda line: line["response"].update(request_id="x-1")),
            "neither_response_nor_error": change_line("output", lambda line: line.update(response=None)),
            "both_response_and_error": change_line(
                "output", lambda line: line.update(error={"code": "a", "message": "b"})
            ),
            "a_number_for_custom_id": change_line("output", lambda line: line.update(custom_id=7)),
            "half_a_line": rewrite("output", lambda lines: [*lines[:-1], lines[-1][:-9]]),
            "no_json": rewrite("output", lambda lines: [b"<html>\n", *lines[1:]]),
            "not_a_number": rewrite("output", lambda lines: [lines[0].replace(b":200", b":NaN"), *lines[1:]]),
            "no_utf8": rewrite("output", lambda lines: [lines[0].replace(b'"p', b'"\xff'), *lines[1:]]),
            "a_key_twice": rewrite(
                "output", lambda lines: [lines[0].replace(b'{"id"', b'{"error":null,"id"'), *lines[1:]]
            ),
        },
    ),
    *damages(
        "mixed",
        ["line_shape"],
        {"an_error_without_words": change_line("error", lambda line: line.update(error={"code": "x"}))},
    ),
    *damages(
        "guarded",
        ["codes_known"],
        {"a_code_that_is_on_no_page": change_line("error", lambda line: line["error"].update(code="guardrail_whim"))},
    ),
    *damages(
        "guarded",
        ["usage"],
        {"less_than_the_answers_say": job("output_tokens = 4"), "less_input": job("input_tokens = 0")},
    ),
    *damages("mixed", ["line_place", "outcome_places"], {"a_refusal_among_the_answers": move_to_output}),
    *damages(
        "mixed",
        ["line_place"],
        {
            "an_answer_among_the_errors": rewrite(
                "error", lambda lines: [lines[0].replace(b":400", b":200"), *lines[1:]]
            )
        },
    ),
    *damages(
        "cancelled",
        ["never_ran"],
        {
            "another_code": change_line("error", lambda line: line["error"].update(code="batch_expired")),
            "other_words": change_line("error", lambda line: line["error"].update(message="No.")),
            "a_code_of_its_own": change_line("error", lambda line: line["error"].update(code="upstream_ambiguous")),
            "failed_on_record": outcome("outcome = 'failed'", "outcome = 'cancelled'"),
        },
    ),
    *damages(
        "plain",
        ["never_ran"],
        {"never_ran_in_a_completed_job": outcome("outcome = 'expired'"), "expired_count": job("expired_count = 1")},
    ),
]
RECORDS = [
    *damages(
        "plain",
        ["counts"],
        {"count_off_by_one": job("answered_count = answered_count - 1"), "count": job("failed_count = 1")},
    ),
    *damages(
        "plain",
        ["tries"],
        {
            "never_fitted": job("schema_invalid_count = 1"),
            "asked_twice": change_line("output", asked_twice),
            "asked_twice_where_no_other_model_was_to_be_asked": both(
                job("""answers = '{"tries_max": 0, "escalate_to": null}'"""), change_line("output", asked_twice)
            ),
            "as_many_on_record_as_were_allowed_in_all": both(
                attempt(), sql("update attempts set tries = '[{}]' where job_id = $job")
            ),
        },
    ),
    *damages("running", ["counts"], {"count_of_a_running_job": job("answered_count = answered_count + 1")}),
    *damages(
        "plain",
        ["usage"],
        {
            f"{column}_off_by_one": job(f"{column} = {column} + 1")
            for column in ("input_tokens", "cached_tokens", "output_tokens")
        },
    ),
    *damages(
        "plain",
        ["usage"],
        {
            "an_answer_that_cost_more": change_line(
                "output", lambda line: line["response"]["body"]["usage"].update(prompt_tokens=999)
            )
        },
    ),
    *damages(
        "plain",
        ["cost"],
        {
            "a_cost_that_no_line_has": job("cost_nano = cost_nano + 1"),
            "a_line_that_cost_something": change_line(
                "output",
                lambda line: line.update(
                    tidegate={"cost": "0.5", "input_cost": "0.2", "cached_cost": "0", "output_cost": "0.3"}
                ),
            ),
        },
    ),
    *damages(
        "plain",
        ["line_shape"],
        {
            "a_cost_that_is_not_the_sum_of_its_parts": change_line(
                "output",
                lambda line: line.update(
                    tidegate={"cost": "0", "input_cost": "0.2", "cached_cost": "0", "output_cost": "0"}
                ),
            )
        },
    ),
    *damages(
        "plain",
        ["outcomes_whole"],
        {
            "an_outcome_lost": sql("delete from outcomes where job_id = $job and number = 24"),
            "an_outcome_of_no_item": outcome("number = 25", "number = 24"),
        },
    ),
    *damages(
        "plain",
        ["outcome_places"],
        {
            "wrong_at": outcome("at = at + 1"),
            "wrong_size": outcome("size_bytes = size_bytes - 1"),
            "wrong_kind": outcome("outcome = 'failed'"),
        },
    ),
    *damages("plain", ["slices"], {"a_slice_left_over": sql(SLICE)}),
    *damages(
        "running",
        ["slices"],
        {
            "a_slice_lost": sql("delete from slices where job_id = $job and first = 56"),
            "slices_overlap": sql("update slices set count = 5 where job_id = $job and first = 52"),
            "done_too_early": sql("update slices set state = 'done' where job_id = $job and first = 52"),
            "leased_to_no_worker": sql("update slices set state = 'leased' where job_id = $job and first = 52"),
            "an_outcome_of_a_running_job_lost": sql("delete from outcomes where job_id = $job and number = 0"),
        },
    ),
    *damages(
        "plain",
        ["attempts"],
        {
            "attempts_without_end": attempt(count=3),
            "attempts_for_no_reason": attempt(reason="felt_like_it"),
            "attempts_uncounted": attempt(count=0),
            "handed_back_once_too_often": attempt(count=0, reason="handed_back", hand_backs=3),
            "handed_back_uncounted": attempt(count=0, reason="handed_back"),
            "attempts_of_no_item": attempt(number=25),
            "attempts_too_late": attempt(not_before="expires_at + 60001"),
        },
    ),
]
FILES = [
    *damages(
        "plain",
        ["input_unchanged"],
        {
            "input_changed": blob("input", lambda data: data.__setitem__(slice(80, 81), b"!")),
            "input_cut": blob("input", lambda data: data.__delitem__(slice(-1, None))),
            "input_size": sql(
                "update files set size_bytes = size_bytes + 1 where id = (select input_file_id from jobs where id = $job)"
            ),
        },
    ),
    *damages("plain", ["pieces"], {"extent_hole": cut_in_two(10), "extent_overlap": cut_in_two(-10)}),
    *damages(
        "plain",
        ["pieces"],
        {"extent_past_its_blob": sql("update blobs set size_bytes = 10 where kind = 'answers'")},
    ),
    *damages(
        "plain",
        ["bytes_kept"],
        {
            "blob_truncated": blob("output", lambda data: data.__delitem__(slice(100, None))),
            "blob_lost": lose_blob,
            "blob_condemned": sql("update blobs set state = 'condemned' where kind = 'answers'"),
            "blob_unused": sql("update blobs set uses = 0 where kind = 'answers'"),
            "blob_unknown": sql("delete from blobs where kind = 'answers'"),
        },
    ),
    *damages(
        "running",
        ["bytes_kept"],
        {"work_file_condemned": sql("update blobs set state = 'condemned' where kind = 'work'")},
    ),
    *damages(
        "plain",
        ["bytes_kept"],
        {"file_unknown": sql("delete from files where id = (select output_file_id from jobs where id = $job)")},
    ),
    *damages(
        "plain",
        ["file_sizes"],
        {
            "file_size": sql("update files set size_bytes = size_bytes + 1 where job_id = $job and state = 'ready'"),
            "line_count": sql("update files set line_count = line_count - 1 where job_id = $job and state = 'ready'"),
            "output_bytes": job("output_bytes = output_bytes + 1"),
            "file_hash": sql("update files set sha256 = 'ab' where job_id = $job and state = 'ready'"),
        },
    ),
    *damages(
        "running",
        ["files_shown"],
        {
            "a_file_visible_too_early": sql(
                "update files set state = 'ready' where id = (select output_file_id from jobs where id = $job)"
            ),
            "a_growing_file_lost": job("error_file_id = null"),
        },
    ),
    *damages(
        "plain",
        ["files_shown"],
        {
            "a_file_hidden_at_the_end": sql(
                "update files set state = 'growing' where job_id = $job and state = 'ready'"
            ),
            "an_empty_file_shown": sql("update files set state = 'ready' where job_id = $job and state = 'deleted'"),
            "a_file_forgotten": job("output_file_id = null"),
            "a_file_of_another_tenant": sql("update files set tenant_id = 'x' where job_id = $job"),
        },
    ),
    *damages("refused", ["files_shown"], {"a_refused_job_with_a_file": job("output_file_id = 'file_x'")}),
]
JOBS = [
    *damages(
        "plain",
        ["moments"],
        {
            "timestamp_order": job("finalizing_at = in_progress_at - 1"),
            "ended_before_it_began": job("completed_at = created_at - 1"),
            "two_ends": job("failed_at = completed_at"),
            "no_end": job("completed_at = null"),
            "cancelled_and_completed": job("cancelling_at = in_progress_at"),
            "closing_as_something_else": job("closing = 'failed'"),
            "never_finalizing": job("finalizing_at = null"),
            "ended_in_the_future": job("finalizing_at = completed_at + 1"),
        },
    ),
    *damages("expired", ["moments"], {"expired_too_early": job("expires_at = closing_at + 1")}),
    *damages("running", ["moments"], {"running_with_an_end": job("completed_at = in_progress_at")}),
    *damages(
        "refused",
        ["refusal"],
        {"refused_without_a_reason": job("errors = '[]'"), "refused_with_results": job("answered_count = 1")},
    ),
    *damages(
        "refused",
        ["refusal"],
        {"an_error_on_no_line": job("""errors = '[{"code": "a", "message": "b", "line": 99}]'""")},
    ),
    *damages(
        "early",
        ["refusal", "outcomes_whole"],
        {"outcomes_without_ingest": sql("insert into outcomes values ($job, 0, 'answered', 0, 1, null)")},
    ),
    *damages(
        "plain",
        ["ledger"],
        {
            "more_in_the_ledger": sql("update usage set input_tokens = input_tokens + 1 where job_id = $job"),
            "less_in_the_ledger": sql("delete from usage where job_id = $job"),
            "another_tenants_usage": sql("update usage set tenant_id = 'other' where job_id = $job"),
        },
    ),
    *damages(
        "plain",
        ["database_sound"],
        {
            "an_index_that_lost_its_rows": sql(
                "pragma writable_schema = on; update sqlite_schema set sql = replace(sql, 'created_at, id', 'id, created_at') "
                "where name = 'files_by_tenant'"
            )
        },
    ),
    *damages(
        "running",
        ["not_stuck"],
        {
            "stuck": both(
                job("created_at = 1000, expires_at = 2000"),
                sql("update workers set state = 'alive', alive_until = 9000000000000"),
            ),
            "stuck_though_its_bytes_can_be_written": both(
                job("state = 'finalizing', expires_at = 1000 * unixepoch() - 600000"),
                sql("update workers set state = 'alive', alive_until = 9000000000000"),
            ),
        },
    ),
]
CALLS = [
    *damages(
        "plain",
        ["repeats_have_reasons", "no_repeats"],
        {"a_repeated_call": add_call(later(0.01))},
        witness=True,
        allowed={"expect_no_repeats": True},
    ),
    *damages(
        "mixed",
        ["repeats_have_reasons"],
        {"one_repeat_too_many": add_call(later(0.01), lambda call: call["status"] == 503)},
        witness=True,
    ),
    *damages(
        "plain",
        ["no_repeats"],
        {"a_free_repeat_where_none_is_expected": add_call(later(-0.01, status=429))},
        witness=True,
        allowed={"expect_no_repeats": True},
    ),
    *damages(
        "cancelled",
        ["calls_in_time"],
        {"a_call_after_cancel": after("cancelling_at", 3_001)},
        witness=True,
    ),
    *damages("expired", ["calls_in_time"], {"a_call_after_the_deadline": after("expires_at", 1_001)}, witness=True),
    *damages(
        "expired",
        ["calls_in_time"],
        {"a_free_repeat_after_the_deadline": both(add_call(later(-0.01, status=429)), add_call(later(1e6)))},
        witness=True,
    ),
    *damages("plain", ["one_key"], {"another_key": add_call(other_hash)}, witness=True),
    *damages("plain", ["calls_known"], {"a_call_for_no_item": add_call(another_item)}, witness=True),
    *damages("plain", ["results_called"], {"an_answer_without_a_call": forget_calls}, witness=True),
    *damages(
        "mixed",
        ["results_called"],
        {
            "a_refusal_of_the_gateways_own_after_a_call": both(
                change_line("error", lambda line: line["response"]["body"]["error"].update(code="invalid_request"), 0),
                replace_call(lambda call: [call | {"status": 503}], lambda call: call["status"] == 400),
            )
        },
        witness=True,
    ),
    *damages(
        "plain",
        ["repeats_have_reasons"],
        {"a_shared_call_made_again": replace_call(shared_twice, lambda call: True)},
        witness=True,
    ),
    *damages(
        "mixed",
        ["answers_kept"],
        {"an_answer_thrown_away": add_call(later(-0.01, status=200, fault=""), lambda call: call["status"] == 400)},
        witness=True,
    ),
]
DAMAGES = [*LINES, *RECORDS, *FILES, *JOBS, *CALLS]


@pytest.mark.parametrize("damage", [pytest.param(damage, id=damage.id) for damage in DAMAGES])
def test_damage_is_seen(world: JudgedWorld, damage: Damage) -> None:
    damage.harm(world, world.jobs[damage.job])
    report = world.judged_now(damage.job, witness=damage.witness, **damage.allowed)
    assert not report.ok
    assert damage.seen_by <= set(report.violated), report.to_text()
    assert "VIOLATED" in report.to_text()


def test_every_rule_is_shown_to_fail() -> None:
    shown = {rule for damage in DAMAGES for rule in damage.seen_by} | {"monotone"}
    assert shown == {rule.id for rule in judge.RULES}


CHANGES = {
    "a_count_shrank": "answered_count = answered_count - 1",
    "the_state_went_back": "state = 'validating'",
    "an_end_moved": "completed_at = completed_at + 1",
    "a_file_changed": "output_file_id = 'file_other'",
    "the_deadline_moved": "expires_at = expires_at + 1",
}


@pytest.mark.anyio
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_what_changes_backwards_between_two_looks_is_seen(world: JudgedWorld, change: str) -> None:
    async with world.opened() as (records, blobs):
        refresh, looks = records.refresh, 0

        async def refresh_and_change() -> None:
            nonlocal looks
            await refresh()
            looks += 1
            if looks == 2:
                job(change)(world, world.jobs["plain"])

        records.refresh = refresh_and_change  # type: ignore[method-assign]
        report = await judge.judge(records, blobs, world.jobs["plain"])
    assert report.violated == ("monotone",), report.to_text()


def test_evidence_is_bounded_and_safe_to_print(world: JudgedWorld) -> None:
    evil = "\x1b[31m" + "x" * 5_000
    rewrite(
        "output",
        lambda lines: [
            line.replace(b'"custom_id":"', b'"custom_id":' + json.dumps(evil).encode()[:-1]) for line in lines
        ],
    )(world, world.jobs["plain"])
    report = world.judged_now("plain")
    check = next(check for check in report.checks if check.id == "items_once")
    assert check.violation_count == 50
    assert len(check.evidence) == EVIDENCE_COUNT_MAX
    assert "- and 40 more" in report.to_text()
    assert "\x1b" not in report.to_text()
    assert len(report.to_text()) < 40_000


def test_no_prompt_and_no_answer_is_shown(world: JudgedWorld) -> None:
    rewrite("output", lambda lines: [b'{"secret-answer": "canary-text"}\n', b"canary-text\n", *lines[2:]])(
        world, world.jobs["plain"]
    )
    blob("input", lambda data: data.__setitem__(slice(None, 11), b"canary-text"))(world, world.jobs["plain"])
    report = world.judged_now("plain")
    assert {"line_shape", "input_unchanged"} <= set(report.violated)
    assert "canary-text" not in report.to_text() + json.dumps(report.to_json())


def test_a_job_may_expire_because_it_did_not_begin_in_time(world: JudgedWorld) -> None:
    job("expires_at = closing_at + 1000, begin_by = closing_at - 1")(world, world.jobs["expired"])
    assert "moments" not in world.judged_now("expired").violated


def test_files_that_were_deleted_are_no_violation(world: JudgedWorld) -> None:
    """Owners delete files; what is left is judged."""
    job_id = world.jobs["plain"]
    for kind in ("input", "output"):
        file_id = file_of(world, job_id, kind)
        world.sql("delete from extents where file_id = ?", (file_id,))
        world.sql("update files set state = 'deleted', deleted_at = 1 where id = ?", (file_id,))
        report = world.judged_now("plain", witness=True)
        assert report.ok, report.to_text()
    assert {"input_unchanged", "line_shape", "items_once", "usage"}.isdisjoint(
        check.id for check in report.checks if check.verdict == "ok"
    )


def test_without_its_input_a_job_is_judged_by_item_numbers(world: JudgedWorld) -> None:
    job_id = world.jobs["plain"]
    world.sql("delete from extents where file_id = ?", (file_of(world, job_id, "input"),))
    world.sql("delete from files where id = ?", (file_of(world, job_id, "input"),))
    assert world.judged_now("plain").ok
    rewrite("output", lambda lines: lines[1:])(world, job_id)
    assert "items_once" in world.judged_now("plain").violated
