"""Whose share a job counts as: the share owner that a flow is made of, as one text. It knows callers and nothing of jobs or models."""

from collections.abc import Sequence

from tidegate.core.nouns import Caller


def tenant_owner(tenant_id: str) -> str:
    return f"tenant:{tenant_id}"


def run_owner(tenant_id: str, run: str) -> str:
    """The owner of the jobs of one `tidegate run`, whose own process alone may run them."""
    return f"run:{tenant_id}/{run}"


def share_owner_of(caller: Caller, preference: Sequence[str]) -> str:
    """The first of these that the caller has: `organization`, `team`, `key`, `user`. Everyone has an organization."""
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
    """The id of the tenant that a share owner is of or a part of; empty for a key's, which does not tell."""
    kind, _, name = share_owner.partition(":")
    return "" if kind == "key" else name.partition("/")[0]


def _plain(name: str) -> str:
    """Escape control characters, so that logs and pages show the name in one line; different names stay different."""
    return "".join(char if char.isprintable() and char != "%" else f"%{ord(char):02x}" for char in name)
