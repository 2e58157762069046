"""What callers may not put into a body, through real processes: one that does all, and API and worker apart."""

from __future__ import annotations

import json
from typing import Any

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.tidegate import Site

CHAT = "/v1/chat/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "https://images.example.com/cat.png"}}
CODES = {
    "file": "parameter_not_allowed",
    "priority": "parameter_not_allowed",
    "picture": "media_not_allowed",
    "spelling": "duplicate_parameter",
}


def bodies(model: str) -> dict[str, dict[str, Any]]:
    def body(*parts: Any, **more: Any) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": list(parts) or "hi"}], "max_tokens": 4, **more}

    return {
        "file": body({"type": "text", "text": "hi", "file_id": "file-1"}),
        "priority": body(priority=1),
        "picture": body({"type": "text", "text": "hi"}, PICTURE),
        "spelling": body(Model="dearer"),
        "fine": body(),
    }


@CLUSTER_IN_SOAK
def test_both_doors_refuse_the_same_unless_the_model_allows_it(site: Site) -> None:
    place = [{"url": site.engine.url}]
    open_model = {
        "deployments": place,
        "allowed_fields": ["file_id", "priority"],
        "media_hosts": ["images.example.com"],
    }
    site.configure(models={"m": {"deployments": place}, "open": open_model})
    site.begin()
    lines = []
    for model in ("m", "open"):
        for name, body in bodies(model).items():
            lines.append(json.dumps({"custom_id": f"{model} {name}", "url": CHAT, "method": "POST", "body": body}))
            answer = site.client().post(CHAT, json=body)
            refused = name in CODES and (model == "m" or name == "spelling")
            code = answer.json().get("error", {}).get("code")
            assert code == (CODES[name] if refused else None), answer.text
            assert answer.status_code == (400 if refused else 200)
    ended = site.ended(site.submit(lines))
    assert ended.batch["status"] == "completed"
    found = {line["custom_id"]: line["response"]["body"]["error"]["code"] for line in ended.errors}
    assert found == {**{f"m {name}": code for name, code in CODES.items()}, "open spelling": "duplicate_parameter"}
    assert {line["response"]["status_code"] for line in ended.errors} == {400}
    assert {line["custom_id"] for line in ended.output} == {
        "m fine",
        *(f"open {n}" for n in bodies("m") if n != "spelling"),
    }
