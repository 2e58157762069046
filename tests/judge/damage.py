# ruff: noqa: S608 - the statements are this file's own
"""Ways to break a finished or running job behind the product's back: one each for what a rule of the judge must notice.

Damage to lines goes through `rewrite`, which keeps every size, extent and count of bytes consistent: what remains to be seen is the
line itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.judge.world import JudgedWorld
from tidegate.core import ids
from tidegate.judge.lines import ClaimedUsage

Lines = list[bytes]
Harm = Callable[[JudgedWorld, str], None]


@dataclass(frozen=True)
class Damage:
    """What is done to which job, and which rules must say so."""

    id: str
    job: str
    harm: Harm
    seen_by: frozenset[str]
    witness: bool = False
    allowed: dict[str, Any] = field(default_factory=dict)


def content(world: JudgedWorld, file_id: str) -> bytes:
    pieces = []
    sql = "select blob_id, blob_at, size_bytes from extents where file_id = ? order by at"
    for blob_id, blob_at, size_bytes in world.sql(sql, (file_id,)):
        pieces.append(world.blob_path(blob_id).read_bytes()[blob_at : blob_at + size_bytes])
    return b"".join(pieces)


def file_of(world: JudgedWorld, job_id: str, kind: str) -> str:
    return str(world.one(f"select {kind}_file_id from jobs where id = ?", (job_id,)))


def store(world: JudgedWorld, file_id: str, data: bytes) -> None:
    """Give a file these bytes, in one fresh blob, with records to match."""
    blob_id = ids.make("blob", file_id.encode()[-16:])
    path = world.blob_path(blob_id)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    world.sql(
        "insert into blobs (id, kind, state, size_bytes, uses, recorded_to, created_at) values (?, 'rest', 'kept', ?, 1, 0, 0)",
        (blob_id, len(data)),
    )
    world.sql("delete from extents where file_id = ?", (file_id,))
    world.sql(
        "insert into extents (file_id, at, size_bytes, blob_id, blob_at) values (?, 0, ?, ?, 0)",
        (file_id, len(data), blob_id),
    )
    world.sql("update files set size_bytes = ?, line_count = ? where id = ?", (len(data), data.count(b"\n"), file_id))


def rewrite(kind: str, change: Callable[[Lines], Lines]) -> Harm:
    def harm(world: JudgedWorld, job_id: str) -> None:
        file_id = file_of(world, job_id, kind)
        old = content(world, file_id).splitlines(keepends=True)
        new = change(list(old))
        assert new != old, "nothing was damaged"
        data = b"".join(new)
        store(world, file_id, data)
        world.sql(f"update jobs set {kind}_bytes = ? where id = ?", (len(data), job_id))

    return harm


def rewrite_merged(change: Callable[[Lines], Lines]) -> Harm:
    def harm(world: JudgedWorld, job_id: str) -> None:
        file_id = file_of(world, job_id, "merged")
        store(world, file_id, b"".join(change(content(world, file_id).splitlines(keepends=True))))

    return harm


def change_line(kind: str, change: Callable[[dict[str, Any]], object], place: int = 1) -> Harm:
    """Change what one line says."""

    def edit(lines: Lines) -> Lines:
        line = json.loads(lines[place])
        change(line)
        lines[place] = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        return lines

    return rewrite(kind, edit)


def sql(text: str) -> Harm:
    def harm(world: JudgedWorld, job_id: str) -> None:
        world.sql(text.replace("$job", f"'{job_id}'"))

    return harm


def both(*harms: Harm) -> Harm:
    def harm(world: JudgedWorld, job_id: str) -> None:
        for one in harms:
            one(world, job_id)

    return harm


def swap(lines: Lines) -> Lines:
    lines[0], lines[1] = lines[1], lines[0]
    return lines


def reworded(line: dict[str, Any]) -> None:
    """An answer that says something else, in as many letters."""
    message = line["response"]["body"]["choices"][0]["message"]
    message["content"] = message["content"].swapcase()


def asked_twice(line: dict[str, Any]) -> None:
    """The answer did not fit at first, though no schema was asked for."""
    used, none = line["response"]["body"]["usage"], dict.fromkeys(ClaimedUsage.__dataclass_fields__, 0)
    last = none | {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    tries = [none | {"problem": "no text"}, last | {"problem": None}]
    line["tidegate"] = line.get("tidegate", {}) | {"tries": [{"model": "m", "cost": "0", **one} for one in tries]}


def copied(name: str) -> Callable[[dict[str, Any]], object]:
    """A copy of another line."""
    return lambda line: line["tidegate"].update(deduplicated=name)


def reused(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda line: line["tidegate"].update(reused=name)


def copy_of_a_copy(lines: Lines) -> Lines:
    last, before = json.loads(lines[-1]), json.loads(lines[-2])
    last["tidegate"]["deduplicated"] = before["id"]
    return [*lines[:-1], json.dumps(last).encode() + b"\n"]


def rewrite_input(change: Callable[[bytes], bytes]) -> Harm:
    def harm(world: JudgedWorld, job_id: str) -> None:
        file_id = file_of(world, job_id, "input")
        data = content(world, file_id)
        assert change(data) != data, "nothing was damaged"
        store(world, file_id, change(data))

    return harm


def swap_custom_ids(lines: Lines) -> Lines:
    first, second = json.loads(lines[0]), json.loads(lines[1])
    first["custom_id"], second["custom_id"] = second["custom_id"], first["custom_id"]
    return [json.dumps(line).encode() + b"\n" for line in (first, second)] + lines[2:]


def move_to_output(world: JudgedWorld, job_id: str) -> None:
    """A failed line turns up among the answers."""
    output, error = file_of(world, job_id, "output"), file_of(world, job_id, "error")
    failed = content(world, error).splitlines(keepends=True)
    answers = content(world, output)
    refused = next(line for line in failed if b'"status_code":400' in line)
    failed.remove(refused)
    store(world, output, answers + refused)
    store(world, error, b"".join(failed))


def blob(kind: str, change: Callable[[bytearray], object]) -> Harm:
    """Change the bytes of a file's first blob, and nothing else."""

    def harm(world: JudgedWorld, job_id: str) -> None:
        blob_id = world.one(
            "select blob_id from extents where file_id = ? order by at", (file_of(world, job_id, kind),)
        )
        path = world.blob_path(blob_id)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return harm


def lose_blob(world: JudgedWorld, job_id: str) -> None:
    blob_id = world.one("select blob_id from extents where file_id = ?", (file_of(world, job_id, "output"),))
    world.blob_path(blob_id).unlink()


def cut_in_two(gap: int) -> Harm:
    """Two extents instead of one, the second one displaced: a gap, or an overlap."""

    def harm(world: JudgedWorld, job_id: str) -> None:
        file_id = file_of(world, job_id, "output")
        [(size_bytes, blob_id, blob_at)] = world.sql(
            "select size_bytes, blob_id, blob_at from extents where file_id = ?", (file_id,)
        )
        cut = size_bytes // 2
        world.sql("update extents set size_bytes = ? where file_id = ?", (cut, file_id))
        world.sql(
            "insert into extents (file_id, at, size_bytes, blob_id, blob_at) values (?, ?, ?, ?, ?)",
            (file_id, cut + gap, size_bytes - cut, blob_id, blob_at + cut),
        )
        world.sql("update blobs set uses = uses + 1 where id = ?", (blob_id,))

    return harm


def calls_of(world: JudgedWorld, job_id: str) -> list[dict[str, Any]]:
    """The job's calls in the witness."""
    part = f"batch_req_{job_id[6:22]}"
    calls = [json.loads(line) for line in world.witness.read_text().splitlines()]
    return [call for call in calls if str(call["idempotency_key"]).startswith(part)]


def add_call(
    change: Callable[[dict[str, Any]], object], choose: Callable[[dict[str, Any]], bool] = lambda call: True
) -> Harm:
    """One more call in the witness: a copy of one that was there, with a change."""

    def harm(world: JudgedWorld, job_id: str) -> None:
        call = next(call for call in calls_of(world, job_id) if choose(call))
        change(call)
        with world.witness.open("a") as log:
            log.write(json.dumps(call) + "\n")

    return harm


def replace_call(
    change: Callable[[dict[str, Any]], list[dict[str, Any]]], choose: Callable[[dict[str, Any]], bool]
) -> Harm:
    """Other calls instead of one in the witness."""

    def harm(world: JudgedWorld, job_id: str) -> None:
        replaced = next(call for call in calls_of(world, job_id) if choose(call))
        calls = [json.loads(line) for line in world.witness.read_text().splitlines()]
        kept = [one for call in calls for one in (change(call) if call == replaced else [call])]
        world.witness.write_text("".join(json.dumps(call) + "\n" for call in kept))

    return harm


def shared_twice(call: dict[str, Any]) -> list[dict[str, Any]]:
    """A call that an item shares with others, and the same again."""
    part, number = ids.split_item_id(call["idempotency_key"][:32]) or ("", 0)
    shared = call | {"idempotency_key": f"batch_grp_{part}_{number}_{'0' * 16}"}
    return [shared, shared | {"at": call["at"] + 0.01}]


def later(seconds: float, **changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda call: call.update(at=call["at"] + seconds, **changes)


def after(column: str, ms: int) -> Harm:
    """A call to the last item, which had none, some time after a moment of the job."""

    def harm(world: JudgedWorld, job_id: str) -> None:
        moment = world.one(f"select {column} from jobs where id = ?", (job_id,))
        call = calls_of(world, job_id)[-1] | {"at": (moment + ms) / 1000}
        key = call["idempotency_key"]
        call["idempotency_key"] = ids.item_id(job_id, 59) + key[32:]
        with world.witness.open("a") as log:
            log.write(json.dumps(call) + "\n")

    return harm


def forget_calls(world: JudgedWorld, job_id: str) -> None:
    key = calls_of(world, job_id)[3]["idempotency_key"]
    kept = [line for line in world.witness.read_text().splitlines(keepends=True) if key not in line]
    world.witness.write_text("".join(kept))


def foreign_id(line: dict[str, Any]) -> None:
    line["id"] = "chatcmpl-" + line["id"][10:]


def other_number(number: int) -> Callable[[dict[str, Any]], object]:
    return lambda line: line.update(id=ids.item_id("batch_" + line["id"][10:26] + "x" * 6, number))


def other_job(line: dict[str, Any]) -> None:
    line["id"] = "batch_req_" + "z" * 16 + line["id"][26:]


def other_hash(call: dict[str, Any]) -> None:
    call["at"] += 0.1
    call["idempotency_key"] = re.sub(r"-[0-9a-f]+$", "-0123456789abcdef", call["idempotency_key"])


def another_item(call: dict[str, Any]) -> None:
    key = call["idempotency_key"]
    call["idempotency_key"] = key[:26] + "00zzzz" + key[32:]


def last_item(call: dict[str, Any]) -> None:
    """The last of eight items."""
    key = call["idempotency_key"]
    call["idempotency_key"] = key[:26] + "000007" + key[32:]


def outcome(change: str, where: str = "number = 3") -> Harm:
    return sql(f"update outcomes set {change} where job_id = $job and {where}")


def job(change: str) -> Harm:
    return sql(f"update jobs set {change} where id = $job")


SLICE = (
    "insert into slices (job_id, first, count, model, endpoint, state, ready_at, lease_count, lost_count, read_first, work_at, work_bytes, "
    "work_units) values ($job, 0, 1, 'm', '/v1/chat/completions', 'ready', 0, 0, 0, 0, 0, 1, 1)"
)
ATTEMPT = (
    "insert into attempts (job_id, number, count, not_before, reason, hand_backs) "
    "select id, {}, {}, {}, '{}', {} from jobs where id = $job"
)


def attempt(
    number: int = 0,
    count: int = 1,
    not_before: str = "in_progress_at",
    reason: str = "upstream_ambiguous",
    hand_backs: int = 0,
) -> Harm:
    return sql(ATTEMPT.format(number, count, not_before, reason, hand_backs))


def damages(job_name: str, rules: Sequence[str], harms: dict[str, Harm], **more: Any) -> list[Damage]:
    return [Damage(id, job_name, harm, frozenset(rules), **more) for id, harm in harms.items()]
