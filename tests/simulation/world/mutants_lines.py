"""Planted bugs of copied lines, of answers that must fit, and of the jobs of other doors."""

import math
from typing import Any

import msgspec

from tests.simulation.world.planting import Mutant, both, patch, sql
from tidegate.core.answers import copied_lines
from tidegate.core.answers.answer_checks import AnswerCheck
from tidegate.core.nouns import Usage
from tidegate.stages import publish_lines
from tidegate.stages.ingest import same_lines
from tidegate.stages.perform import Performer
from tidegate.store.road import leases, outcomes, responses
from tidegate.worker import leasing
from tidegate.worker.leased_work import LeasedWork
from tidegate.worker.leasing import LeaseRoom

_deduplicated_line = copied_lines.deduplicated_line
_reused_line = copied_lines.reused_line
_request_key = same_lines.request_key
_write_copy = publish_lines.CopyWriter._write_copy
_paid_try = Performer._paid_try


def _key_by_item(line: Any, rules: Any) -> bytes:
    return _request_key(line, rules) + bytes(line.custom_id)


async def _copy_the_first(self: Any, leader: int, custom_id: bytes, sources: Any) -> None:
    await _write_copy(self, leader if self._leader is None else self._leader[0], custom_id, sources)


async def _skip_failed(self: Any, leader: int, custom_id: bytes, sources: Any) -> None:
    if not any(not source.is_answered and source.places.get(leader)[1] for source in sources):
        await _write_copy(self, leader, custom_id, sources)


def _pay_for_fitting(self: Performer, model: str, ended: Any, problem: str | None) -> Any:
    paid = _paid_try(self, model, ended, problem)
    return paid if problem is None else msgspec.structs.replace(paid, usage=Usage())


async def _note_nothing(*arguments: Any) -> None:
    """Write no event."""


async def _find_none(*arguments: Any) -> list[Any]:
    """Find no response that has waited its time."""
    return []


async def _remember_none(*arguments: Any) -> None:
    """Find no job that the same key made."""


LINES: dict[str, Mutant] = {
    "same_requests_run": Mutant(
        "same", "identical requests are run each", patch(same_lines, "request_key", _key_by_item)
    ),
    "bodies_unread": Mutant(
        "same",
        "requests count as the same whatever they say",
        patch(same_lines, "request_key", lambda line, rules: b""),
    ),
    "copies_of_the_first": Mutant(
        "same", "all copies get one item's line", patch(publish_lines.CopyWriter, "_write_copy", _copy_the_first)
    ),
    "copies_twice": Mutant(
        "same",
        "the line of a copy is written twice",
        patch(publish_lines, "deduplicated_line", lambda *arguments: 2 * _deduplicated_line(*arguments)),
    ),
    "failed_copies_lost": Mutant(
        "same", "a copy of a failed item has no line", patch(publish_lines.CopyWriter, "_write_copy", _skip_failed)
    ),
    "changes_unseen": Mutant(
        "edited",
        "an answer is taken over by its custom_id alone",
        patch(same_lines, "request_key", lambda line, rules: b""),
    ),
    "answers_unused": Mutant(
        "edited", "what an earlier job answered runs again", patch(same_lines, "_answered", lambda *arguments: {})
    ),
    "reused_twice": Mutant(
        "edited",
        "the line of an answer that was taken over is written twice",
        patch(publish_lines, "reused_line", lambda *arguments: 2 * _reused_line(*arguments)),
    ),
    "misfits_pass": Mutant(
        "fitting", "answers are not checked", patch(AnswerCheck, "problem", lambda self, body: None)
    ),
    "one_try_more": Mutant(
        "fitting",
        "an answer is asked for once too often",
        patch(Performer, "_may_escalate", lambda self, terms, leased, tried: tried == terms.tries_max + 1),
    ),
    "misfits_free": Mutant(
        "fitting", "answers that do not fit count as free", patch(Performer, "_paid_try", _pay_for_fitting)
    ),
    "never_escalated": Mutant(
        "escalated",
        "what does not fit is filed before the stronger model was asked",
        patch(Performer, "_may_escalate", lambda self, terms, leased, tried: False),
    ),
    "escalated_twice": Mutant(
        "escalated",
        "the stronger model is asked as long as nothing fits",
        patch(Performer, "_may_escalate", lambda self, terms, leased, tried: tried < terms.tries_max + 3),
    ),
    "ends_unnoted": Mutant(
        "doors", "what became of items is not noted", patch(outcomes, "record_lines", _note_nothing)
    ),
    "begins_unnoted": Mutant("doors", "which items began is not noted", patch(leases, "record_running", _note_nothing)),
    "accepted_twice": Mutant(
        "background",
        "a response that is sent again is another one",
        both(
            patch(responses, "idempotent_object", _remember_none), patch(responses, "remember_object", _remember_none)
        ),
    ),
    "turns_missed": Mutant(
        "waiting",
        "a response that has waited its time goes on waiting",
        both(
            patch(LeaseRoom, "long_waiting", _find_none),
            patch(LeasedWork, "_turn_interactive", lambda self, now_ms: None),
        ),
    ),
    "turns_early": Mutant(
        "waiting",
        "a response goes like a user's call before its time",
        patch(
            leasing, "_interactive_at_ms", lambda leased, until_ms: -math.inf if leased.interactive_in_ms else math.inf
        ),
    ),
    "requests_unheld": Mutant(
        "background",
        "the request of a response does not count as a user of its bytes",
        sql("blob_share", "uses = uses + 1", "uses = uses + 0"),
    ),
}
