"""Settings: four layers, the last one that speaks wins, and every mistake is one clear sentence."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from tidegate.core.errors import SettingsError
from tidegate.settings import catalog, load
from tidegate.settings.rules import local_path


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tidegate.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **overrides: object) -> str:
    path = write(tmp_path, text) if text else None
    with pytest.raises(SettingsError) as caught:
        load(path, None, overrides, environ or {})
    return str(caught.value)


def test_by_default_everything_lies_in_the_data_directory(tmp_path: Path) -> None:
    loaded = load(None, tmp_path, {}, {})
    assert local_path(loaded.settings.store.location) == tmp_path / "tidegate.db"
    assert local_path(loaded.settings.blobs.url) == tmp_path / "blobs"
    assert loaded.settings.server.port == 8080
    assert loaded.origins["server.port"] == "default"
    assert loaded.origins["data"] == "option"
    assert loaded.warnings == ()


def test_each_layer_overrules_the_one_before_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "server:\n  port: 1\n  host: localhost\nworker: {poll_ms: 20}\n")
    environ = {"TIDEGATE_SERVER_PORT": "2", "TIDEGATE_WORKER_GRACE_MS": "5"}
    loaded = load(path, None, {"server.port": 3, "worker.in_flight_max": None}, environ)
    settings, origins = loaded.settings, loaded.origins
    assert (settings.server.port, origins["server.port"]) == (3, "option")
    assert (settings.server.host, origins["server.host"]) == ("localhost", f"{path}:3")
    assert (settings.worker.grace_ms, origins["worker.grace_ms"]) == (5, "TIDEGATE_WORKER_GRACE_MS")
    assert (settings.worker.poll_ms, origins["worker.poll_ms"]) == (20, f"{path}:4")
    assert (settings.worker.in_flight_max, origins["worker.in_flight_max"]) == (64, "default")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "server: {port: 7}")
    assert load(None, None, {}, {"TIDEGATE_CONFIG": str(path)}).settings.server.port == 7


def test_an_empty_file_an_empty_group_and_an_empty_variable_say_nothing(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n"), None, {}, {}).settings == load(None, None, {}, {}).settings
    loaded = load(write(tmp_path, "server:\nstore: {pool_size: }\n"), None, {}, {"TIDEGATE_SERVER_PORT": ""})
    assert loaded.settings.server.port == 8080
    assert loaded.origins["store.pool_size"] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("servre: {port: 1}", "servre is not a known key; did you mean `server`? [{file}:1]"),
        ("server:\n  prot: 1", "server.prot is not a known key; did you mean `port`? [{file}:2]"),
        ("server: {port: abc}", "server.port is 'abc', but must be a whole number from 0 to 65,535 [{file}:1]"),
        ("server: {port: 65536}", "server.port is 65536, but must be a whole number from 0 to 65,535"),
        ("server: {port: 80.5}", "server.port is 80.5, but must be a whole number"),
        ("server: {port: true}", "server.port is true, but must be a whole number"),
        ("server: {port: [1]}", "server.port is a list, but must be a whole number"),
        ("server: {host: 12}", "server.host is 12, but must be text"),
        ('server: {host: "a\\nb"}', "server.host is 'a\\nb', but must be text"),
        ("server: 8080", "server is 8080, but must be a mapping of: host, port"),
        ("ingest: {single_model: 1}", "ingest.single_model is 1, but must be true or false"),
        ("logging: {level: loud}", "logging.level is 'loud', but must be debug or error or info or warning"),
        ("limits: {windows: 12h}", "limits.windows is '12h', but must be 24h or any"),
        ("endpoints: [/v2/x]", "endpoints.0 is '/v2/x', but must be text"),
        ("endpoints: /v1/rerank", "endpoints is '/v1/rerank', but must be a list"),
        ("http: {read_timeout_s: .nan}", "http.read_timeout_s is"),
        ("http: {pool_timeout_s: 0.01}", "http.pool_timeout_s is 0.01, but must be a number from 0.1 to 300"),
        ("store: {url: mysql://x/y}", "store.url must begin with sqlite:///, or postgresql:// [{file}:1]"),
        ("store: {url: 'postgresql://host'}", "store.url names no database"),
        ("blobs: {url: 's3:///prefix'}", "blobs.url names no bucket"),
        ("blobs: {access_key_id: env:K}", "blobs.access_key_id names the environment variable K, which is not set"),
        ("blobs: {endpoint: 'http://h:1'}", "blobs.endpoint is plain http"),
        ("upstream: {url: 'localhost:8000'}", "is not an http(s) address"),
        ("upstream: {url: 'http://me:pw@h/v1'}", "its url carries a user or password"),
        ("upstream: {url: 'http://h:99999/v1'}", "its url cannot be read"),
        ("upstream: {api_key: 5}", "upstream.api_key must be env:NAME"),
        ("upstream: {api_key: ''}", "upstream.api_key must be env:NAME"),
        (
            "upstream: {api_key: 'file:/no/such/file'}",
            "upstream.api_key names the file /no/such/file, which cannot be read",
        ),
        ("worker: {heartbeat_ms: 2000, lease_ms: 5000}", "worker.heartbeat_ms is more than a third of worker.lease_ms"),
        ("worker: {in_flight_max: 501}", "worker.in_flight_max is more than http.connections_max (500)"),
        ("http: {connections_max: 64}", "http.kept_alive_max is more than http.connections_max (64)"),
        ("redis: {url: 'http://h'}", "redis.url must begin with redis://, rediss:// or unix://"),
        ("metrics: {port: 8080}", "metrics.port is server.port"),
        ("admin: {port: 8080}", "admin.port is server.port"),
        ("{admin: {port: 9090}, metrics: {port: 9090}}", "admin.port is metrics.port"),
        ("scheduler: {mode: smart}", "scheduler.mode is 'smart', but must be fair_share_v1 or"),
        ("scheduler: {shadow_mode: x}", "scheduler.shadow_mode is 'x', but must be"),
        ("scheduler: {urgent_share: 1.5}", "scheduler.urgent_share is 1.5, but must be a number from 0 to 1"),
        ("scheduler: {scope_preference: [team, team]}", "scheduler.scope_preference names one twice"),
        ("scheduler: {scope_preference: []}", "scheduler.scope_preference has 0 entries, but needs 1"),
        ("scheduler: {scope_preference: [tenant]}", "scheduler.scope_preference.0 is 'tenant', but must be"),
        ("scheduler: {queues: [express]}", "scheduler.queues lacks `default`"),
        ("scheduler: {queue_weights: {express: 2}}", "scheduler.queue_weights.express is not one of scheduler.queues"),
        ("scheduler: {queue_order: fastest}", "scheduler.queue_order is 'fastest', but must be text"),
        ("scheduler: {rank: 'os.system'}", "scheduler.rank is 'os.system', but must be text"),
        (
            "scheduler: {fast_lane: true, fast_lane_share: 0.6}",
            "scheduler.fast_lane_share and scheduler.urgent_share are more than the whole together",
        ),
        (
            "scheduler: {fast_lane: true, fast_lane_units: 1000, large_units: 1000}",
            "scheduler.fast_lane_units must be below scheduler.large_units",
        ),
        ("scheduler: {admission: maybe}", "scheduler.admission is 'maybe', but must be off or refuse or warn"),
        ("limits: {window_min_s: 100, window_max_s: 50}", "limits.window_min_s is more than limits.window_max_s"),
        ("server: {port: 1}\nserver: {port: 2}", "{file}:2: `server` is given twice"),
        ("server: {port: 1", "{file}:1 is not valid YAML"),
        ("- a\n- b", "must hold keys and values"),
        ("server: !!python/object/apply:os.system [id]", "server"),
        ("when: 2024-99-99", "{file}:1: this value cannot be read (month must be in 1..12); quote it."),
    ],
)
def test_a_mistake_in_the_file_says_what_is_allowed_and_where(tmp_path: Path, text: str, says: str) -> None:
    assert says.replace("{file}", str(tmp_path / "tidegate.yaml")) in refusal(tmp_path, text)


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    error = refusal(tmp_path, "server: {port: -1, hots: x}\nworker: {poll_ms: 0}", {"TIDEGATE_SERVER_HOTS": "x"})
    assert len(error.splitlines()) == 4


def test_unknown_variables_are_refused_with_the_nearest(tmp_path: Path) -> None:
    error = refusal(tmp_path, environ={"TIDEGATE_SERVER_PROT": "1"})
    assert error == "TIDEGATE_SERVER_PROT is not a known variable; did you mean `TIDEGATE_SERVER_PORT`? [environment]"


def test_variables_that_kubernetes_makes_for_a_service_of_our_name_are_not_ours() -> None:
    environ = {
        "TIDEGATE_SERVICE_HOST": "10.0.0.1",
        "TIDEGATE_PORT": "tcp://10.0.0.1:8080",
        "TIDEGATE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "TIDEGATE_SERVER_PORT": "tcp://10.0.0.1:8080",
        "TIDEGATE_SERVER_SERVICE_PORT_HTTP": "8080",
    }
    assert load(None, None, {}, environ).settings.server.port == 8080


def test_an_unknown_option_is_refused_with_the_nearest(tmp_path: Path) -> None:
    option: dict[str, Any] = {"server.prot": 1}
    assert refusal(tmp_path, **option) == "server.prot is not a known setting; did you mean `server.port`?"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "absent.yaml", "There is no configuration file"), (tmp_path, "cannot be read")):
        with pytest.raises(SettingsError, match=says):
            load(path, None, {}, {})
    (tmp_path / "latin").write_bytes(b"server: {host: \xff}")
    with pytest.raises(SettingsError, match="is not UTF-8"):
        load(tmp_path / "latin", None, {}, {})


def test_a_file_that_explodes_through_aliases_is_refused(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
    )
    assert "too deeply or too large" in refusal(tmp_path, bomb)
    assert "too deeply or too large" in refusal(tmp_path, "a: &a [*a]\n")
    assert "is not valid YAML" in refusal(tmp_path, "[" * 5_000)


PLAIN = [one for one in catalog.settings() if not isinstance(catalog.bare(one.type), inspect.DictType)]


@pytest.mark.parametrize("setting", PLAIN, ids=lambda one: one.key)
def test_every_setting_has_a_sentence_a_variable_and_bounds(setting: catalog.Setting) -> None:
    assert setting.about.endswith(".")
    assert setting.variable.startswith("TIDEGATE_")
    assert setting.allowed
    for text in ("\x00", "x" * 5_000):
        with pytest.raises(SettingsError, match=setting.key):
            load(None, None, {}, {setting.variable: text})


def test_numbers_are_bounded_at_both_ends() -> None:
    for setting in catalog.settings():
        kind = catalog.bare(setting.type)
        for bound, step in ((getattr(kind, "ge", None), -1), (getattr(kind, "le", None), 1)):
            if bound is not None:
                with pytest.raises(SettingsError, match=f"{setting.key} is .* but must be"):
                    load(None, None, {setting.key: bound + step}, {})


def test_variables_have_no_double_meaning() -> None:
    variables = [setting.variable for setting in catalog.settings()]
    assert len(set(variables)) == len(variables)


def test_lists_and_mappings_in_a_variable() -> None:
    environ = {"TIDEGATE_ENDPOINTS": "/v1/rerank, /v1/score", "TIDEGATE_INGEST_SINGLE_MODEL": "yes"}
    settings = load(None, None, {}, environ).settings
    assert settings.endpoints == ("/v1/rerank", "/v1/score")
    assert settings.ingest.single_model is True
    assert load(None, None, {}, {"TIDEGATE_ENDPOINTS": '["/v1/rerank"]'}).settings.endpoints == ("/v1/rerank",)


def test_local_paths_are_absolute_unless_they_begin_with_a_dot() -> None:
    assert local_path("sqlite:///var/t.db") == local_path("sqlite:////var/t.db") == Path("/var/t.db")
    assert local_path("file:///.tidegate/blobs") == Path.cwd() / ".tidegate/blobs"


def test_words_are_read_in_any_case(tmp_path: Path) -> None:
    path = write(tmp_path, "scheduler: {mode: FAIR_SHARE_V1, scope_preference: [Team, User]}\nlogging: {level: Debug}")
    settings = load(path, None, {}, {"TIDEGATE_SCHEDULER_ADMISSION": "Refuse"}).settings
    assert (settings.scheduler.mode, settings.scheduler.admission) == ("fair_share_v1", "refuse")
    assert settings.scheduler.scope_preference == ("team", "user")
    assert settings.logging.level == "debug"


def test_what_works_but_should_be_known_is_a_warning() -> None:
    warnings = load(None, None, {"redis.url": "redis://h:6379/0", "scheduler.shadow_mode": "smart_v1"}, {}).warnings
    assert [warning.split()[0] for warning in warnings] == ["redis.url", "scheduler.shadow_mode"]


def test_durations_and_sizes_may_be_written_with_their_units(tmp_path: Path) -> None:
    path = write(tmp_path, "worker: {lease_ms: 30s, heartbeat_ms: 1500ms}\nlimits: {file_bytes_max: 200MB}\n")
    environ = {
        "TIDEGATE_RETENTION_FILE_S": "1d12h",
        "TIDEGATE_HTTP_READ_TIMEOUT_S": "1.5m",
        "TIDEGATE_SERVER_PORT": "81",
    }
    settings = load(path, None, {"limits.line_bytes_max": "1 MiB"}, environ).settings
    assert (settings.worker.lease_ms, settings.worker.heartbeat_ms) == (30_000, 1_500)
    assert (settings.limits.file_bytes_max, settings.limits.line_bytes_max) == (200_000_000, 1 << 20)
    assert (settings.retention.file_s, settings.http.read_timeout_s) == (129_600, 90.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("worker: {lease_ms: 30 parsecs}", "worker.lease_ms is '30 parsecs', but must be"),
        ("worker: {lease_ms: 30MB}", "or text such as `30s`, `24h` or `1h30m`"),
        ("worker: {lease_ms: 1ms}", "worker.lease_ms is '1ms', but must be"),
        ("retention: {file_s: 1500ms}", "retention.file_s is '1500ms', but must be"),
        ("limits: {file_bytes_max: 24h}", "or text such as `200MB` or `8GiB`"),
        ("server: {port: 81s}", "server.port is '81s', but must be a whole number from 0 to 65,535 ["),
        ("worker: {lease_ms: -30s}", "worker.lease_ms is '-30s', but must be"),
    ],
)
def test_what_is_no_duration_or_size_is_refused_with_an_example(tmp_path: Path, text: str, complaint: str) -> None:
    assert complaint in refusal(tmp_path, text)


def test_everything_wrong_in_lists_and_mappings_is_reported_at_once(tmp_path: Path) -> None:
    deployments = "[{url: 5}, {url: 'http://a/v1', weight: heavy}]"
    text = f"models:\n  one: {{deployments: {deployments}}}\n  two: {{deployments: [{{nonsense: 1}}]}}\ntenants: {{a: 5, b: 6}}\n"
    lines = refusal(tmp_path, text).splitlines()
    begins = ["models.one.deployments.0.url", "models.one.deployments.1.weight", "models.two.deployments.0.nonsense"]
    begins += ["tenants.a", "tenants.b"]
    assert all(any(line.startswith(begin) for line in lines) for begin in begins), lines


def test_many_mistakes_are_counted_and_the_first_twenty_shown(tmp_path: Path) -> None:
    def wrong(count: int) -> list[str]:
        return refusal(tmp_path, "".join(f"wrong{number}: 1\n" for number in range(count))).split("\n")

    assert [line.split()[0] for line in wrong(20)] == [f"wrong{number}" for number in range(20)]
    assert (len(wrong(23)), wrong(23)[-1]) == (21, "… and 3 more")
