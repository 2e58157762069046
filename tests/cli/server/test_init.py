"""`tidegate init`: what it writes can be used as it is, and with any of its comments taken away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Desk
from tidegate.cli.server.init import EXAMPLES, SHOWN, configuration
from tidegate.settings import catalog, load

ENVIRON = {
    "STORE_URL": "postgresql://user@host/tidegate",
    "MODEL_SERVER_KEY": "k",
    "S3_ACCESS_KEY_ID": "i",
    "S3_SECRET_ACCESS_KEY": "s",
}


def uncommented(text: str, pattern: str) -> str:
    return re.sub(pattern, r"\1\2", text, flags=re.MULTILINE)


def test_a_new_user_serves_with_what_init_wrote(desk: Desk) -> None:
    output = desk.done("init", "--upstream", desk.engine.url).stderr()
    assert "tidegate serve --config tidegate.yaml" in output
    desk.done("doctor", "--config", "tidegate.yaml")
    serve = desk.start("serve", "--config", "tidegate.yaml", "--port", "0")
    serve.wait_for_line("listening on http")
    refused = desk.done("init", code=2).stderr()
    assert "tidegate.yaml is there already" in refused
    desk.done("init", "--force")
    assert "http://localhost:8000/v1" in (desk.here / "tidegate.yaml").read_text()


@pytest.mark.parametrize("upstream", ["no url", "ftp://h/v1", "http://key@h/v1"])
def test_a_wrong_upstream_writes_nothing(desk: Desk, upstream: str) -> None:
    desk.done("init", "--upstream", upstream, code=2)
    assert not (desk.here / "tidegate.yaml").exists()


def test_every_comment_taken_away_still_loads_and_shows_the_default(tmp_path: Path) -> None:
    path = tmp_path / "tidegate.yaml"
    text = configuration("tidegate.yaml", "http://localhost:8000/v1")
    path.write_text(uncommented(text, r"^(  )# ([a-z_]+: \S.*)$"))
    loaded = load(path, None, {}, ENVIRON)
    shown = {f"{group}.{name}" for group, names in SHOWN.items() for name in names}
    assert {key for key, origin in loaded.origins.items() if origin != "default"} == shown | {"upstream.url"}
    for key in shown - EXAMPLES.keys():
        group, name = key.split(".")
        assert getattr(getattr(loaded.settings, group), name) == catalog.by_key()[key].default, key
    path.write_text(
        uncommented(
            text.replace("upstream:\n", "#", 1).replace("  url: http://localhost", "# "),
            r"^()# ((?:models|tenants| +).*)$",
        )
    )
    settings = load(path, None, {}, ENVIRON).settings
    assert settings.models["my-model"].deployments[0].url == "http://10.0.0.5:8000/v1"
    assert settings.tenants["acme"].weight == 2
