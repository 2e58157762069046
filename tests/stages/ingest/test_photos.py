"""Lines with photos: what they ask of a model is an image, and not a megabyte of letters."""

import json
from pathlib import Path

import msgspec
import pytest

from tidegate.core.input.lines import LineRules
from tidegate.core.input.slices import plan_of_line
from tidegate.core.usage.estimate import work_units
from tidegate.core.usage.inline_files import FILE_BYTES_PER_TOKEN, FILE_TOKENS
from tidegate.stages.ingest.ingest_file import ingest_file
from tidegate.upstream.tide.tides import prompt_tokens
from tidegate.web.completion_batch.inline_items import estimated_tokens
from tidegate.web.jobs.forecast import sampled_units

RULES = LineRules("/v1/chat/completions")
LETTERS = 40_000
PHOTO_TOKENS = FILE_TOKENS + LETTERS // FILE_BYTES_PER_TOKEN


def photo_line(number: int, letters: int = LETTERS) -> bytes:
    url = "data:image/png;base64," + f"{number:04}" * (letters // 4)
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "m", "max_tokens": 10, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": f"c{number}", "url": RULES.endpoint, "body": body}).encode() + b"\n"


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_photo_costs_what_an_image_likely_has(count: int, tmp_path: Path) -> None:
    lines = [photo_line(number) for number in range(count)]
    (tmp_path / "in").write_bytes(b"".join(lines))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", RULES)
    read = plan.prompt_bytes - plan.file_bytes
    around = read - count * 4 * PHOTO_TOKENS
    assert 0 < around < count * 200
    assert sum(one.work_units for one in plan.slices) == pytest.approx(work_units(read, 10 * count), abs=count)


def test_one_line_is_planned_and_sampled_alike(tmp_path: Path) -> None:
    line = photo_line(0)
    (tmp_path / "in").write_bytes(line)
    plan = ingest_file(tmp_path / "in", tmp_path / "work", RULES)
    alone = plan_of_line(line, RULES)
    assert (alone.prompt_bytes, alone.file_bytes) == (plan.prompt_bytes, plan.file_bytes)
    assert alone.slices[0].work_units == plan.slices[0].work_units
    assert sampled_units([line[:-1]], len(line), RULES) == {"m": plan.slices[0].work_units}


def test_copies_of_a_photo_are_taken_off_once(tmp_path: Path) -> None:
    lines = [photo_line(0), photo_line(0).replace(b"c0", b"c1"), photo_line(2)]
    (tmp_path / "in").write_bytes(b"".join(lines))
    rules = LineRules(RULES.endpoint, dedupe=True)
    plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
    assert plan.copied.deduplicated == 1
    assert plan.file_bytes == 2 * plan_of_line(lines[0], RULES).file_bytes


def test_a_photo_that_is_not_in_the_prompt_is_not_taken_off(tmp_path: Path) -> None:
    first, second = (
        photo_line(number, 400).replace(
            b'"model": "m"', b'"model": "m", "metadata": {"url": "data:image/png;base64,%b"}' % (b"A" * LETTERS)
        )
        for number in range(2)
    )
    (tmp_path / "in").write_bytes(first + second)
    plan = ingest_file(tmp_path / "in", tmp_path / "work", RULES)
    assert plan.file_bytes == 0


def test_the_tide_and_the_completion_batch_count_a_photo_as_an_image() -> None:
    body = json.dumps(json.loads(photo_line(0))["body"]).encode()
    assert PHOTO_TOKENS < prompt_tokens(body) < PHOTO_TOKENS + 100
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    assert PHOTO_TOKENS < estimated_tokens(fields) < PHOTO_TOKENS + 100
