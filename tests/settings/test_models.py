"""Models and deployments as section by section of the YAML, turned into what the engine calls."""

from pathlib import Path

import pytest

from tests.settings.conftest import load_text
from tidegate.core.deployments import Deployment, EngineKind, HttpLimits, Secret, Tls
from tidegate.core.errors import SettingsError
from tidegate.core.retry import RetryPolicy
from tidegate.core.usage.prices import Surcharge
from tidegate.settings import deployments, load, resources
from tidegate.settings.models import retry_policies, servers_name

YAML = """\
models:
  llama-3-8b:
    deployments:
      - url: http://10.0.0.5:8000/v1
        engine: vllm
        api_key: env:VLLM_KEY
        max_in_flight: 32
      - {url: "https://10.0.0.6/v1", name: spare, weight: 2, read_timeout_s: 600, tls: {ca_file: /ca.pem}}
  "meta/other:70b":
    deployments: [{url: "http://10.0.0.7/v1"}]
"""


def deployments_of(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> tuple[Deployment, ...]:
    return deployments(load_text(tmp_path, text, environ).settings)


def test_every_entry_becomes_a_deployment(tmp_path: Path) -> None:
    found = deployments_of(tmp_path, YAML, {"VLLM_KEY": "k"})
    assert found == (
        Deployment(
            name="llama-3-8b/1",
            url="http://10.0.0.5:8000/v1",
            models=("llama-3-8b",),
            engine=EngineKind.VLLM,
            api_key=Secret("k"),
            max_in_flight=32,
        ),
        Deployment(
            name="spare",
            url="https://10.0.0.6/v1",
            models=("llama-3-8b",),
            is_capacity_known=False,
            weight=2.0,
            read_timeout_s=600.0,
            tls=Tls(ca_file="/ca.pem"),
        ),
        Deployment(
            name="meta/other:70b/1", url="http://10.0.0.7/v1", models=("meta/other:70b",), is_capacity_known=False
        ),
    )


def test_the_name_of_the_servers_changes_with_what_they_serve_and_not_with_how_it_is_written(tmp_path: Path) -> None:
    def name(*places: tuple[str, str]) -> str:
        models = [f"  {model}: {{deployments: [{{url: '{url}'}}]}}\n" for model, url in places]
        return servers_name(load_text(tmp_path, "models:\n" + "".join(models)).settings)

    usual = name(("a", "http://h:1/v1"), ("b", "http://h:2"))
    assert name(("b", "http://h:2/v1/"), ("a", "http://h:1/")) == usual
    others = {name(("a", "http://h:2"), ("b", "http://h:1")), name(("a", "http://h:1")), name(("c", "http://h:1"))}
    assert len(others - {usual}) == 3


def test_one_gateway_takes_every_model(tmp_path: Path) -> None:
    text = "upstream: {url: 'http://localhost:8000/v1'}\nworker: {in_flight_max: 100}"
    one = Deployment(name="upstream", url="http://localhost:8000/v1", max_in_flight=100, is_capacity_known=False)
    assert deployments_of(tmp_path, text) == (one,)


def test_there_is_one_gateway_or_deployments_by_model_never_both(tmp_path: Path) -> None:
    text = "upstream: {url: 'http://h/v1'}\nmodels: {m: {deployments: [{url: 'http://i/v1'}]}}"
    with pytest.raises(SettingsError, match=r"upstream.url and `models` are both set: .* remove one of them"):
        deployments_of(tmp_path, text)


def test_models_may_be_a_variable() -> None:
    environ = {"TIDEGATE_MODELS": '{"m": {"deployments": [{"url": "http://h/v1"}]}}'}
    loaded = load(None, None, {}, environ)
    assert [one.name for one in deployments(loaded.settings)] == ["m/1"]
    assert loaded.origins["models"] == "TIDEGATE_MODELS"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "models: {m: {deployments: [{url: 'http://h', max_inflight: 3}]}}",
            "models.m.deployments.0.max_inflight is not a known key; did you mean `max_in_flight`?",
        ),
        ("models: {m: {deployment: []}}", "models.m.deployment is not a known key; did you mean `deployments`?"),
        ("models: {m: {deployments: []}}", "models.m.deployments has 0 entries, but needs 1"),
        ("models: {m: {deployments: [{engine: vllm}]}}", "models.m.deployments.0.url is missing"),
        (
            "models: {m: {deployments: ['http://h']}}",
            "models.m.deployments.0 is 'http://h', but must be a mapping of: url, name",
        ),
        ("models: {m: }", "models.m is null, but must be a mapping of: deployments"),
        ("models: [m]", "models is a list, but must be a mapping from name to value"),
        (
            "models: {m: {deployments: [{url: 'ftp://h'}]}}",
            "models.m.deployments.0 cannot be used: deployment 'm/1': url 'ftp://h' is not an http(s) address",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', engine: llama}]}}",
            "models.m.deployments.0.engine is 'llama', but must be anthropic or",
        ),
        ("models: {m: {deployments: [{url: 'http://h', weight: 0}]}}", "models.m.deployments.0.weight is 0"),
        (
            "models: {m: {deployments: [{url: 'http://h', api_key: 'env:NO'}]}}",
            "models.m.deployments.0.api_key names the environment variable NO, which is not set",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', tls: {key_file: k}}]}}",
            "tls.key_file is set without tls.cert_file",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h', name: x}, {url: 'http://i', name: x}]}}",
            "models.m.deployments.1 has the name 'x', which models.m.deployments.0 has already",
        ),
    ],
)
def test_a_mistake_names_the_deployment(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        deployments_of(tmp_path, text)
    assert says in str(caught.value)


def test_a_mistake_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tidegate\.yaml:3\]"):
        deployments_of(tmp_path, "models:\n  gpt-4.1:\n    deployments: [{url: 'ftp://x'}]\n")
    with pytest.raises(SettingsError, match=r"models.llama-3-8b.deployments.0.api_key .*tidegate\.yaml:6\]"):
        deployments_of(tmp_path, YAML)


def test_the_defaults_are_the_engine_s_own() -> None:
    settings = load(None, None, {}, {}).settings
    assert settings.http.limits() == HttpLimits()
    assert settings.retry.policy() == RetryPolicy()


def test_one_gateway_has_settings_of_its_own(tmp_path: Path) -> None:
    loaded = load_text(
        tmp_path,
        "upstream: {url: 'https://h/v1', engine: vllm, read_timeout_s: 60, total_timeout_s: 300, ca_file: /ca.pem, cert_file: /c.pem,"
        " key_file: /k.pem, api_key: os.environ/THE_KEY}",
        {"THE_KEY": "k"},
    )
    (one,) = deployments(loaded.settings)
    assert (one.engine, one.read_timeout_s, one.total_timeout_s) == (EngineKind.VLLM, 60.0, 300.0)
    assert (one.tls, one.api_key) == (Tls("/ca.pem", "/c.pem", "/k.pem"), Secret("k"))
    assert loaded.warnings == ()


def test_a_certificate_that_is_not_checked_is_warned_about(tmp_path: Path) -> None:
    (warning,) = load_text(
        tmp_path, "models: {m: {deployments: [{url: 'https://h/v1', tls: {verify: false}}]}}"
    ).warnings
    assert "deployment m/1 is not checked" in warning


def test_a_model_may_be_tried_again_in_its_own_way(tmp_path: Path) -> None:
    place = "deployments: [{url: 'http://h/v1'}]"
    settings = load_text(
        tmp_path,
        f"retry: {{attempts_max: 7}}\nmodels: {{a: {{{place}}}, b: {{{place}, retry: {{backoff_ms: 1000, backoff_ms_max: 60000}}}}}}\n"
        "resources: {chat: {model: b, total_timeout_s: 9}}",
    ).settings
    own = RetryPolicy(attempts_max=7, backoff_ms=1000, backoff_ms_max=60_000)
    assert retry_policies(settings) == {"b": own, "chat": own}
    assert resources(settings)[0].total_timeout_s == 9.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {m: {deployments: [{url: 'http://h'}], retry: {backoff_ms: 60000}}}", "above backoff_ms_max"),
        ("models: {m: {deployments: [{url: 'http://h', endpoint_timeouts_s: {chat: 5}}]}}", "must be text"),
        ("upstream: {url: 'https://h', key_file: /k.pem}", "without tls.cert_file"),
        (
            "models: {m: {deployments: [{url: 'http://h'}]}}\nresources: {a: {model: m, fallbacks: [b]}, b: {model: m, fallbacks: [a]}}",
            "resources.a.fallbacks lead back to it \\(a -> b -> a\\)",
        ),
        (
            "models: {m: {deployments: [{url: 'http://h'}]}}\nresources: {a: {model: m, fallbacks: [x]}}",
            "resources.a.fallbacks.0 is 'x', which neither `models` nor `resources` names",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        deployments_of(tmp_path, text)


@pytest.mark.parametrize(("stated", "is_known"), [(0, False), (1, True), (7, True)])
def test_one_upstreams_calls_are_learned_unless_they_are_stated(stated: int, is_known: bool) -> None:
    environ = {"TIDEGATE_UPSTREAM_URL": "http://h/v1", "TIDEGATE_UPSTREAM_MAX_IN_FLIGHT": str(stated)}
    settings = load(None, None, {}, environ).settings
    [deployment] = deployments(settings)
    assert deployment.is_capacity_known is is_known
    assert deployment.max_in_flight == (stated or settings.worker.in_flight_max)


def test_an_own_engine_charges_no_extra_and_a_provider_all_that_the_price_does_not_cover(tmp_path: Path) -> None:
    text = """\
models:
  m:
    deployments:
      - {url: 'http://h/v1', engine: vllm, price: {output: 2}}
      - {url: 'http://h/v1', engine: openai, price: {output: 2, covers: [modalities]}}
      - {url: 'http://h/v1', engine: vllm}
"""
    own, bought, free = (one.price for one in deployments(load_text(tmp_path, text).settings))
    assert own is not None
    assert bought is not None
    assert own.covers == frozenset(Surcharge)
    assert bought.covers == {Surcharge.MODALITIES}
    assert free is None, "its calls need no price of what they may use"
