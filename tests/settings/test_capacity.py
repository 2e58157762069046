"""Limits, resources, tenants and tiers: what an operator may say, what it becomes, and what is refused in which words."""

from pathlib import Path

import pytest

from tests.settings.conftest import load_text
from tidegate.core.budgets.budget import Budget, BudgetKind, Limit, LimitBound, Period
from tidegate.core.deployments import Estimate, Hints, Resource, TideMode
from tidegate.core.errors import SettingsError
from tidegate.core.schedule.policy import Policy
from tidegate.settings import Settings, Tenants, deployments, load, resources, slot_caps

ONE = "models: {m: {deployments: [{url: 'http://h/v1'}]}}\n"


def settings_of(tmp_path: Path, text: str) -> Settings:
    return load_text(tmp_path, text).settings


def test_everything_about_a_deployment_reaches_the_core(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        """\
models:
  m:
    in_flight_max: 7
    deployments:
      - url: http://h/v1
        name: a
        engine: SGLang
        max_in_flight: 10
        batch_fraction: 0.25
        tokens_in_flight_max: 5000
        estimate: bound
        tide: "off"
        metrics_url: http://h:9/metrics
        metrics_names: {running: my_running}
        hints: {priority_field: priority, priority: 5, objective_header: X-Objective, prefix_header: X-Prefix}
        limits:
          - {period: Minute, requests: 10, tokens: 100}
          - {period: LIFETIME, tokens: 5, enabled: false}
worker: {in_flight_max_global: 99}
""",
    )
    (found,) = deployments(settings)
    assert found.limits == (Limit(Period.MINUTE, 10, 100), Limit(Period.LIFETIME, None, 5, enabled=False))
    assert (found.estimate, found.tide) == (Estimate.BOUND, TideMode.OFF)
    assert (found.tokens_in_flight_max, found.batch_fraction, found.background_in_flight_max) == (5000, 0.25, 2)
    assert (found.metrics_url, found.metrics_names) == ("http://h:9/metrics", {"running": "my_running"})
    assert found.hints == Hints("priority", 5, "X-Objective", "batch", "", "", "X-Prefix")
    assert slot_caps(settings) == {"a": 2, "model:m": 7, "global": 99}


def test_caps_that_are_off_are_not_there(tmp_path: Path) -> None:
    assert slot_caps(settings_of(tmp_path, ONE)) == {"m/1": 64}


def test_a_resource_is_a_route_to_a_model(tmp_path: Path) -> None:
    text = (
        ONE
        + "resources: {chat: {model: m, limits: [{period: hour, requests: 5}]}, m: {limits: [{period: day, tokens: 9}]}}"
    )
    assert resources(settings_of(tmp_path, text)) == (
        Resource("chat", "m", (Limit(Period.HOUR, 5),)),
        Resource("m", "m", (Limit(Period.DAY, None, 9),)),
    )
    anywhere = "upstream: {url: 'http://h/v1'}\nresources: {chat: {model: whatever}}"
    assert resources(settings_of(tmp_path, anywhere)) == (Resource("chat", "whatever"),)


def test_a_tenant_has_its_own_or_the_common_budgets(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        """\
tiers: {gold: 4}
budgets: {tenant: [{period: minute, requests: 100}], key: [{period: minute, requests: 9}]}
scheduler: {in_flight_units_max: 500}
tenants:
  acme:
    tier: gold
    limits: [{period: day, tokens: 7}]
    limits_per_team: [{period: week, requests: 6}]
    limits_per_user: [{period: hour, requests: 3}]
    queued_units_max: 8
  globex: {weight: 0.5, in_flight_units_max: 0, limits_per_key: [{period: minute, requests: 1, enabled: false}]}
""",
    )
    tenants = Tenants(settings)
    acme, globex, other = tenants.of("acme"), tenants.of("globex"), tenants.of("unknown")
    assert (acme.weight, globex.weight, other.weight) == (4.0, 0.5, 1.0)
    assert (acme.in_flight_units_max, globex.in_flight_units_max, acme.queued_units_max) == (500, 0, 8)
    assert acme.budgets("tenant_1", "ann", "k1", "batch_1", (Limit(Period.LIFETIME, 5),), "red") == (
        Budget(LimitBound.TENANT, "tenant_1", (Limit(Period.DAY, None, 7),)),
        Budget(LimitBound.TEAM, "tenant_1/red", (Limit(Period.WEEK, 6),)),
        Budget(LimitBound.USER, "tenant_1/ann", (Limit(Period.HOUR, 3),)),
        Budget(LimitBound.KEY, "k1", (Limit(Period.MINUTE, 9),)),
        Budget(LimitBound.JOB, "batch_1", (Limit(Period.LIFETIME, 5),)),
    )
    assert [budget.bound for budget in other.budgets("tenant_3", "ann", None)] == [LimitBound.TENANT]
    assert [budget.bound for budget in globex.budgets("tenant_2", "ann", "k2")] == [LimitBound.TENANT]
    assert tenants.names() == {"acme", "globex"}
    caps = tenants.in_flight_caps
    assert caps == {"globex": 0}
    tenants.follow(Settings())
    assert caps == {}, "those who have it see that the settings name no tenant any more"


def test_calls_at_once_are_bounded_for_a_tenant_each_of_its_users_and_each_key(tmp_path: Path) -> None:
    named = "tenants: {acme: {parallel_max: 9, parallel_max_per_user: 4, parallel_max_per_key: 3}}"
    tenants = Tenants(settings_of(tmp_path, named))
    acme, other = tenants.of("acme"), tenants.of("unknown")
    tenant, user = ("tenant:tenant_1", 9), ("user:tenant_1/ann", 4)
    for own_max, key_max in ((0, 3), (2, 2), (5, 3)):
        assert acme.parallel("tenant_1", "ann", "k1", own_max) == (tenant, user, ("key:k1", key_max))
    assert acme.parallel("tenant_1", None, None, 0) == (tenant,)
    assert other.parallel("tenant_1", "ann", "k1", 2) == (("key:k1", 2),)
    assert other.parallel("tenant_1", "ann", "k1", 0) == ()


def test_a_key_creates_as_many_batches_as_both_its_tenant_and_the_key_itself_allow(tmp_path: Path) -> None:
    text = "tenants: {acme: {limits_per_key: [{period: hour, batches: 5}, {period: day, batches: 9}]}}"
    acme = Tenants(settings_of(tmp_path, text)).of("acme")
    own = (Limit(Period.HOUR, jobs=2), Limit(Period.DAY, jobs=20))
    assert acme.creation_budgets("tenant_1", "red", "ann", "k1", own) == (
        Budget(LimitBound.KEY, "k1", (Limit(Period.HOUR, 2), Limit(Period.DAY, 9)), BudgetKind.CREATED),
    )


def test_a_tenant_s_cap_replaces_the_common_one() -> None:
    policy = Policy(in_flight_units_max=10, in_flight_units_by_tenant={"tenant_1": 3, "tenant_2": 0})
    caps = {
        "tenant:tenant_1": 3,
        "team:tenant_1/red": 3,
        "user:tenant_2/a/b": 0,
        "tenant:tenant_3": 10,
        "key:abc": 10,
    }
    assert {scope: policy.in_flight_units_max_of(scope) for scope in caps} == caps


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("resources: {r: {model: m}}", "resources.r.model is 'm', which `models` does not name"),
        ("resources: {r: {}}", "resources.r.model is 'r', which `models` does not name"),
        (
            "models: {a: {deployments: [{url: 'http://h'}]}, b: {deployments: [{url: 'http://h'}]}}\nresources: {a: {model: b}}",
            "resources.a.model is 'b', but 'a' is itself a model",
        ),
        ("resources: {r: {modl: m}}", "resources.r.modl is not a known key; did you mean `model`?"),
        (
            "tenants: {a: {tier: glod}}\ntiers: {gold: 2}",
            "tenants.a.tier is 'glod', which is not a tier; did you mean `gold`?",
        ),
        ("tenants: {a: {tier: gold}}", "tenants.a.tier is 'gold', which is not a tier; `tiers` names none yet"),
        ("tenants: {a: {tier: gold, weight: 1}}\ntiers: {gold: 2}", "tenants.a.weight and tier are both given"),
        ("tenants: {a: {weight: 0}}", "tenants.a.weight is 0"),
        (
            "tenants: {a: {limits: [{period: minute}]}}",
            "tenants.a.limits.0 limits nothing: give requests, tokens or both",
        ),
        ("tenants: {a: {limits: [{requests: 1}]}}", "tenants.a.limits.0.period is missing"),
        ("tenants: {a: {limits: [{period: minute, requests: 0}]}}", "tenants.a.limits.0.requests is 0"),
        ("tenants: {a: {limits: [{period: minute, requests: -1}]}}", "tenants.a.limits.0.requests is -1"),
        ("tenants: {a: {limits: [{period: minute, requests: 1.5}]}}", "tenants.a.limits.0.requests is 1.5"),
        (
            "tenants: {a: {limits: [{period: second, requests: 1}]}}",
            "tenants.a.limits.0.period is 'second', but must be day or",
        ),
        (
            "budgets: {user: [{period: minute, requests: 1}, {period: MINUTE, tokens: 1}]}",
            "budgets.user.1 names the period minute a second time",
        ),
        ("budgets: {tenant: {period: minute}}", "budgets.tenant is a mapping, but must be a list"),
        ("tiers: {gold: -1}", "tiers.gold is -1"),
        ("models: {m: {in_flight_max: -1, deployments: [{url: 'http://h'}]}}", "models.m.in_flight_max is -1"),
        ("models: {m: {deployments: [{url: 'http://h', batch_fraction: 0}]}}", "batch_fraction is 0"),
        ("models: {m: {deployments: [{url: 'http://h', metrics_url: 'h/metrics'}]}}", "metrics_url must be a URL"),
        (
            "models: {m: {deployments: [{url: 'http://h', name: global}]}}",
            "has the name 'global', which counts calls of all",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', name: 'model:x'}]}}",
            "has the name 'model:x', which counts calls of all",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', hints: {deadline_header: Authorization}}]}}",
            "hints.deadline_header is 'authorization', a header of the call itself",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', hints: {deadline_header: X-A, prefix_header: x-a}}]}}",
            "hints.prefix_header is 'x-a', which another hint has already",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', hints: {deadline_header: 'a: b'}}]}}",
            "hints.deadline_header is 'a: b', but must be text",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', hints: {priority_field: model}}]}}",
            "hints.priority_field is 'model', a field of the request itself",
        ),
    ],
)
def test_a_mistake_says_where_and_what_to_do(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(tmp_path, text)
    assert says in str(caught.value)


def test_a_list_of_thousands_of_limits_is_refused(tmp_path: Path) -> None:
    many = ", ".join("{period: minute, requests: 1}" for _ in range(5_000))
    with pytest.raises(SettingsError, match=r"budgets\.key has 5,000 entries, but may have 12"):
        settings_of(tmp_path, f"budgets: {{key: [{many}]}}")


def test_limits_may_be_a_variable() -> None:
    environ = {"TIDEGATE_BUDGETS_TENANT": "[{period: Minute, requests: 5}]", "TIDEGATE_TIERS": "{gold: 2}"}
    settings = load(None, None, {}, environ).settings
    assert Tenants(settings).of("anyone").limits == (Limit(Period.MINUTE, 5),)
    assert settings.tiers == {"gold": 2.0}
