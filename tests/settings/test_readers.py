"""A setting that no code reads misleads the operator who sets it: each is held to a reader here."""

import re
from functools import cache
from pathlib import Path

import pytest

import tidegate
from tidegate.settings import catalog

ROOT = Path(tidegate.__file__).parent
SOURCES = {path: path.read_text() for path in ROOT.rglob("*.py") if path.parent.name != "settings"}

# Values that are read as a whole: the method or function that hands them on, which must itself have a caller.
HANDED_ON = {
    "data": r"settings\.data_dir\b",
    "store.url": r"settings\.store\.location\b",
    "upstream": r"\bdeployments\((?:self\.)?\w*\.?settings\)",
    "models": r"\bdeployments\((?:self\.)?\w*\.?settings\)",
    "resources": r"\bresources\((?:self\.)?\w*\.?settings\)",
    "tenants": r"\bTenants\((?:self\.)?\w*\.?settings\)",
    "tiers": r"\bTenants\((?:self\.)?\w*\.?settings\)",
    "budgets": r"\bTenants\((?:self\.)?\w*\.?settings\)",
    "worker.in_flight_max_global": r"\bslot_caps\((?:self\.)?\w*\.?settings\)",
    **dict.fromkeys(("hooks", "guardrails"), r"\bcall_rules\((?:self\.)?\w*\.?settings\)"),
    "added": r"\badded\((?:self\.|parts\.)?\w*\.?_?settings,",
    "redis.url": r"settings\.redis\.location\b",
    "callbacks": r"\.callbacks\.rules\(\)",
    "http": r"\.http\.limits\(",
    "retry": r"\.retry\.policy\(\)",
    "parameters": r"\.parameters\.levels\(\)",
    **{
        key: r"\bschedule_policy\((?:self\.)?\w*\.?settings\)"
        for key in catalog.by_key()
        if key.startswith("scheduler.") and key not in ("scheduler.admission", "scheduler.scope_preference")
    },
    **dict.fromkeys(
        (
            "limits.pending_jobs_max",
            "limits.pending_jobs_per_key_max",
            "limits.pending_responses_max",
            "limits.queued_items_max",
            "limits.stored_bytes_max",
            "limits.jobs_per_hour_max",
            "limits.bytes_per_day_max",
        ),
        r"\.quotas\(\)",
    ),
}


@pytest.mark.parametrize("key", catalog.by_key())
def test_every_setting_is_read_by_something(key: str) -> None:
    group, _, name = key.partition(".")
    direct = rf"\b_?{group}\.{name}\b" if name else rf"settings\.{group}\b"
    handed_on = HANDED_ON.get(key) or HANDED_ON.get(group)
    is_read = _is_found(handed_on) if handed_on else _is_found(direct, key if name else f"settings.{group}")
    assert is_read, f"nothing reads {key}: give it a reader, or take it away"


@cache
def _is_found(pattern: str, words: str = "") -> bool:
    """Whether a source has the pattern. Words that stand in all that it matches are looked for first, which is quicker."""
    return any(words in text and re.search(pattern, text) for text in SOURCES.values())


def test_only_the_settings_read_the_environment() -> None:
    reading = re.compile(r"\bos\.(environ|getenv)\b|\bfrom os import .*(environ|getenv)")
    assert [path for path, text in SOURCES.items() if reading.search(text)] == []
