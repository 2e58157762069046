"""Hooks and guardrails in real processes: settings from a file, code from a directory, a kill within a hook, and what logs say."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes import wait_until
from tests.support.tidegate import END_S, Site, chat_line, requests

CANARY = "canary-51c7"
OWN = """
import pathlib, time
here = pathlib.Path(__file__).parent

def waits(body, about):
    if "wait" in body["messages"][0]["content"]:
        (here / "inside").touch()
        while not (here / "go").exists():
            time.sleep(0.01)

def breaks(body, about):
    if "break" in body["messages"][0]["content"]:
        raise ValueError(str(body))
"""


def configured(site: Site, directory: Path) -> dict[str, str]:
    directory.mkdir()
    (directory / "house_hooks.py").write_text(OWN)
    config = directory / "tidegate.yaml"
    rules = {
        "upstream": {"url": site.engine.url},
        "hooks": {
            "patient": {"before": "house_hooks:waits", "timeout_ms": 60_000},
            "brittle": {"before": "house_hooks:breaks"},
        },
        "guardrails": {
            "words": {"patterns": ["forbidden"], "applies_to": "requests"},
            "short": {"answer_bytes_max": 1, "models": ["mute"]},
        },
    }
    config.write_text(json.dumps(rules))
    return {"TIDEGATE_CONFIG": str(config), "PYTHONPATH": str(directory)}


def test_a_process_killed_within_a_hook_loses_nothing_and_logs_no_text_of_a_caller(
    embedded: Site, tmp_path: Path
) -> None:
    env = configured(embedded, tmp_path / "house")
    lines = [
        *requests(12),
        chat_line("w", f"wait {CANARY}"),
        chat_line("f", f"forbidden {CANARY}"),
        chat_line("b", f"break {CANARY}"),
        chat_line("p", f"pay {CANARY}", model="mute"),
    ]
    proc = embedded.begin(more=env)
    batch_id = embedded.submit(lines)
    wait_until((tmp_path / "house" / "inside").exists, END_S, "an item to be within its hook")
    # The hook holds up its own item alone.
    embedded.until_done(batch_id, len(lines) - 1)
    proc.kill()
    (tmp_path / "house" / "go").touch()
    relief = embedded.relieve(more=env)
    results = embedded.judge(batch_id, lines)
    assert results.error_codes() == {"guardrail_pattern": 1, "guardrail_length": 1, "hook_failed": 1}
    assert {line["custom_id"] for line in results.output} == {"w", *(f"c{number}" for number in range(12))}
    assert len(embedded.calls()) == 14, "twelve, the one that waited, and the one that was paid for in vain"
    assert CANARY not in proc.logs() + relief.logs()
    assert "ValueError" in proc.logs(), "the log names the kind of what broke"


def test_a_hook_that_is_not_there_keeps_a_process_from_starting(embedded: Site, tmp_path: Path) -> None:
    env = configured(embedded, tmp_path / "house")
    (tmp_path / "house" / "house_hooks.py").write_text("def waits(body, about): ...\n")
    proc = embedded.processes.start(embedded.command("serve"), name="serve", env=embedded.environment(more=env))
    wait_until(lambda: not proc.running, END_S, "the process to refuse")
    assert "hooks.brittle" in proc.logs()
    assert "has no 'breaks'; name a function that it defines" in proc.logs()
