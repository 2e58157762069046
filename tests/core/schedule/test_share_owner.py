"""Whose share a job counts as."""

import pytest

from tidegate.core.nouns import Caller
from tidegate.core.schedule.share_owner import share_owner_of, tenant_of

ANN = Caller("tenant_1", "k1", "red", "ann")


@pytest.mark.parametrize("wanted", ["organization", "team", "user"])
def test_equal_names_in_two_organizations_are_two_owners(wanted: str) -> None:
    other = Caller("tenant_2", "k2", "red", "ann")
    assert share_owner_of(ANN, [wanted]) != share_owner_of(other, [wanted])
    assert tenant_of(share_owner_of(other, [wanted])) == "tenant_2"


def test_the_first_that_a_caller_has_is_the_owner() -> None:
    assert share_owner_of(ANN, ["team", "user"]) == "team:tenant_1/red"
    assert share_owner_of(Caller("tenant_1", "k1", None, "ann"), ["team", "user"]) == "user:tenant_1/ann"
    assert share_owner_of(Caller("tenant_1"), ["team", "key", "user"]) == "tenant:tenant_1"
    assert share_owner_of(ANN, ["organization", "team"]) == "tenant:tenant_1"


def test_a_name_is_one_line_and_different_names_stay_different() -> None:
    names = ["a\nb", "a%0ab", "a%b"]
    owners = [share_owner_of(Caller("t", None, name), ["team"]) for name in names]
    assert len(set(owners)) == len(names)
    assert all(owner.isprintable() for owner in owners)
