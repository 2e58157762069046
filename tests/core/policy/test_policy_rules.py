"""Each verdict of policy: which one, and whether it is the end."""

import pytest

from tidegate.core.policy.policy_rules import DenialCode, KeyState, allows, judge, names_allowed

NOW = 1_000_000


@pytest.mark.parametrize(
    ("key", "code", "retryable"),
    [
        (KeyState("k", deleted=True), DenialCode.KEY_DELETED, False),
        (KeyState("k", revoked=True), DenialCode.KEY_REVOKED, False),
        (KeyState("k", expires_at_ms=NOW), DenialCode.KEY_EXPIRED, False),
        (KeyState("k", models=frozenset({"other"})), DenialCode.MODEL_NOT_ALLOWED, False),
        (KeyState("k", resources=frozenset({"other"})), DenialCode.RESOURCE_NOT_ALLOWED, False),
    ],
)
def test_what_is_denied_and_whether_for_good(key: KeyState, code: DenialCode, retryable: bool) -> None:
    denied = judge(key, "m", "r", NOW)
    assert denied is not None
    assert (denied.code, denied.retryable) == (code, retryable)
    assert denied.message.count(": ") >= 1, "a denial says what to do next"


def test_what_is_allowed() -> None:
    key = KeyState(
        "k",
        frozenset({"m"}),
        frozenset({"r"}),
        NOW + 1,
    )
    assert judge(key, "m", "r", NOW) is None
    assert judge(KeyState("k"), "anything", "", NOW) is None


def test_what_a_request_may_name_under_two_allowlists() -> None:
    # A resource with the name of a model may lead to another one.
    routes = {"chat": "m", "mail": "n", "n": "n", "o": "m"}
    for models in (frozenset[str](), frozenset("m"), frozenset("mn"), frozenset("o")):
        for resources in (frozenset[str](), frozenset(["chat", "other"]), frozenset(["mail"])):
            names = names_allowed(models, resources, routes)
            for name in ("chat", "mail", "m", "n", "o", "other"):
                is_allowed = names is None or name in names
                assert allows(models, resources, name, routes) is is_allowed, (models, resources, name)
    assert names_allowed(frozenset(), frozenset(), routes) is None
    assert names_allowed(frozenset("m"), frozenset(), routes) == frozenset({"m", "chat", "o"})
    assert names_allowed(frozenset("mn"), frozenset(["chat", "other"]), routes) == frozenset({"chat"})
    assert names_allowed(frozenset(), frozenset(["mail"]), routes) == frozenset({"mail"})
    assert names_allowed(frozenset("m"), frozenset(["mail"]), routes) == frozenset(), (
        "nothing at all, which is not anything"
    )
