"""The share owner of a job, as one text: the owner whose fair share it counts as.

This module knows callers, but no jobs or models.
"""

from collections.abc import Sequence

from tidegate.core.nouns import Caller


def tenant_owner(tenant_id: str) -> str:
    return f"tenant:{tenant_id}"


def run_owner(tenant_id: str, run: str) -> str:
    """Return the owner of the jobs of one `tidegate run`; only that run's own process may run
    them."""
    return f"run:{tenant_id}/{run}"


def share_owner_of(caller: Caller, preference: Sequence[str]) -> str:
    """Return the owner by the first of these that the caller has: `organization`, `team`, `key`,
    `user`.

    Every caller has an organization.
    """
    for wanted in preference:
        if wanted == "organization":
            break
        if wanted == "team" and caller.team:
            return f"team:{caller.tenant_id}/{_plain(caller.team)}"
        if wanted == "key" and caller.key_id:
            return f"key:{caller.key_id}"
        if wanted == "user" and caller.user:
            return f"user:{caller.tenant_id}/{_plain(caller.user)}"
    return tenant_owner(caller.tenant_id)


def tenant_of(share_owner: str) -> str:
    """Return the id of a share owner's tenant; empty for a key, whose name does not contain it."""
    kind, _, name = share_owner.partition(":")
    return "" if kind == "key" else name.partition("/")[0]


def _plain(name: str) -> str:
    """Escape control characters, so that logs and pages show the name in one line; different names
    stay different.
    """
    return "".join(char if char.isprintable() and char != "%" else f"%{ord(char):02x}" for char in name)
