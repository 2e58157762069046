"""Which models an explanation says have no room beside interactive calls."""

from __future__ import annotations

from tests.upstream.world import deployment
from tidegate.core.deployments import Resource
from tidegate.core.schedule import Reason
from tidegate.web.jobs.explanation import tides_closed

CLOSED = f"nothing: {Reason.TIDE_CLOSED}"


def test_a_model_has_no_room_when_every_deployment_that_names_it_has_none() -> None:
    places = (
        [
            deployment("http://a/", "a", models=("m", "n")),
            deployment("http://b/", "b", models=("n",)),
            deployment("http://any/", "any"),
        ],
        [Resource("route", "m")],
    )
    asked = ("m", "n", "other", "route")
    assert tides_closed(places, [("a", CLOSED), ("b", "half of it")], asked) == ["m", "route"]
    assert tides_closed(places, [("a", CLOSED), ("b", CLOSED)], asked) == ["m", "n", "route"]
    assert tides_closed(places, [("any", CLOSED)], asked) == ["other"]
    assert tides_closed(([], []), [("a", CLOSED)], asked) == []
