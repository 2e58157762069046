"""The example inputs are what their generator makes, and what `make run` promises to show."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.run_directory import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def test_the_generator_makes_exactly_these_files(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "make_examples.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_examples.py"], check=True, timeout=60)
    for name in ("requests.jsonl", "embeddings.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes()


def test_chat_lines_are_many_with_two_models_and_shared_prefixes() -> None:
    lines = [json.loads(line) for line in (EXAMPLES / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 320
    assert len({line["custom_id"] for line in lines}) == 320
    assert Counter(line["body"]["model"] for line in lines) == {"llama-3-8b": 160, "qwen-2.5-7b": 160}
    prompts = Counter(line["body"]["messages"][0]["content"] for line in lines)
    assert sorted(prompts.values()) == [80, 80, 80, 80]
    assert {len(line["body"]["messages"]) for line in lines} == {2, 6, 8}


def test_embedding_lines() -> None:
    lines = [json.loads(line) for line in (EXAMPLES / "embeddings.jsonl").read_text().splitlines()]
    assert len(lines) == 100
    assert {line["url"] for line in lines} == {"/v1/embeddings"}
