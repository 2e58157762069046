"""Write the parts of the docs that the code knows better: settings, commands, routes, metrics, states and rooms.

A page carries such a part between `<!-- generated: NAME -->` and `<!-- /generated -->`; everything else on it is written by
hand. `make docs` runs this, and a test fails while a page says anything else than this would write.
"""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import typer.main
import yaml
from msgspec import NODEFAULT, inspect

from tidegate import metrics as measured
from tidegate.backends.system import LocalWake
from tidegate.cli.app import app as commands
from tidegate.cli.server import init
from tidegate.core import states
from tidegate.core.ports import Wakes
from tidegate.settings import capacity, catalog, guards
from tidegate.settings.groups import Settings
from tidegate.web import app as web
from tidegate.web import scrape
from tidegate.web.context import WebContext
from tidegate.web.doors import SCOPES
from tidegate.web.http.auth import guarded_routes
from tidegate.web.http.routes import Guarded

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src" / "tidegate"
ADVANCED_INTRO = "These tune the inside. Leave them alone unless a measurement says that a default is wrong for you."
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


# ---- settings


def settings() -> str:
    groups: dict[str, list[catalog.Setting]] = {}
    for setting in catalog.settings():
        group, dot, _ = setting.key.rpartition(".")
        if not setting.is_advanced:
            groups.setdefault(group if dot else "", []).append(setting)
    parts = [f"### {group or 'on their own'}\n\n{_settings_table(members)}" for group, members in groups.items()]
    advanced = [setting for setting in catalog.settings() if setting.is_advanced]
    return "\n".join([*parts, f"### advanced\n\n{ADVANCED_INTRO}\n\n{_settings_table(advanced)}"])


def _settings_table(members: list[catalog.Setting]) -> str:
    heads = ("key", "variable", "default", "may be", "what it is for")
    rows = ((f"`{one.key}`", f"`{one.variable}`", _default(one.default), one.allowed, one.about) for one in members)
    return table(heads, rows)


def _default(value: object) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return f"`{value}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return "none" if value in ((), {}) else f"`{value}`"


# ---- a configuration with every key


COLUMNS = 110
ADVANCED_LINE = "Advanced: keep these unless a measurement says that a default is wrong for you."
# What stands where there is no default. A key that is not in force has no space behind its #.
EXAMPLES: dict[str, object] = {
    **init.EXAMPLES,
    "server.trusted_proxies": ["10.0.0.0/8"],
    "upstream.url": init.UPSTREAM,
    "upstream.ca_file": "/etc/tidegate/ca.pem",
    "upstream.cert_file": "/etc/tidegate/client.pem",
    "upstream.key_file": "/etc/tidegate/client.key",
    "upstream.allowed_fields": ["priority"],
    "upstream.media_hosts": ["images.example.com"],
    "scheduler.rank": "my_rules:rank",
    "scheduler.queue_weights": {"default": 4},
    "redis.url": "env:REDIS_URL",
    "budgets.tenant": [{"period": "minute", "requests": 600}],
    "budgets.team": [{"period": "day", "tokens": 10_000_000}],
    "budgets.user": [{"period": "day", "requests": 1_000}],
    "budgets.key": [{"period": "month", "cost": 100}],
    "parameters.defaults": {"temperature": 0},
    "parameters.overrides": {"store": False},
    "parameters.endpoints": {"/v1/chat/completions": {"defaults": {"max_tokens": 1024}}},
    "parameters.models": {"llama-3-8b": {"defaults": {"top_p": 0.9}}},
    "auth.pepper": "env:KEY_PEPPER",
    "auth.bootstrap_key": "env:FIRST_KEY",
    "callbacks.allow_hosts": ["hooks.internal.example.com"],
    "remote.url": "https://gateway.example.com:8080",
    "remote.key": "env:GATEWAY_KEY",
    "added.env_names": ["UP_*"],
    "added.folders": ["/etc/tidegate/added"],
    "endpoints": ["/v1/classify"],
    "failpoints": "record_committed=kill",
}
# Values that an example of each kind of entry sets, and values for keys that it does not set; every other key shows its default.
SET: dict[str, dict[str, object]] = {
    "deployment": {
        "url": "http://10.0.0.5:8000/v1",
        "engine": "vllm",
        "api_key": "env:VLLM_KEY",
        "max_in_flight": 64,
        "limits": [{"period": "minute", "requests": 600, "tokens": 200_000}],
        "upstream_model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "price.input": 0.05,
        "price.cached": 0.01,
        "price.output": 0.1,
    },
    "resource": {"model": "llama-3-8b", "limits": [{"period": "minute", "requests": 50}]},
    "tenant": {"tier": "gold", "limits": [{"period": "day", "tokens": 50_000_000, "cost": 50}]},
    "guardrail": {"patterns": ["AKIA[0-9A-Z]{16}"]},
    "hook": {"before": "my_rules:before"},
}
NOT_SET: dict[str, object] = {
    "name": "llama-a",
    "read_timeout_s": 120,
    "endpoint_timeouts_s": {"/v1/embeddings": 30},
    "tls.ca_file": "/etc/tidegate/ca.pem",
    "tls.cert_file": "/etc/tidegate/client.pem",
    "tls.key_file": "/etc/tidegate/client.key",
    "metrics_url": "http://10.0.0.5:8000/metrics",
    "metrics_names": {"running": "my_engine_running"},
    "hints.priority_field": "priority",
    "hints.objective_header": "X-Objective",
    "hints.fairness_header": "X-Fairness",
    "hints.deadline_header": "X-Deadline-Ms",
    "hints.prefix_header": "X-Prefix",
    "price.covers": ["service_tier"],
    "chat_batching.max_in_flight": 32,
    "queue.url": "env:QUEUE_URL",
    "queue.pool": "llama",
    "queue.requests": "my-requests",
    "queue.results": "my-results",
    "fallbacks": ["llama-3-8b"],
    "total_timeout_s": 600,
    "weight": 2,
    "in_flight_units_max": 500_000,
    "limits_per_team": [{"period": "day", "cost": 20}],
    "limits_per_user": [{"period": "day", "requests": 1_000}],
    "limits_per_key": [{"period": "minute", "requests": 20}],
    "tenants": ["acme"],
    "keys": ["key_0f3kQ2mZ8s1xW7vB4nD9Lc"],
    "models": ["llama-3-8b"],
    "schema": {"type": "object", "required": ["total"]},
    "use": "my_rules:judge",
    "after": "my_rules:after",
}
MODEL = """\
  # The public name that callers ask for.
  llama-3-8b:
    # Calls in flight over all processes; 0 lifts it.
    in_flight_max: 0
    # In place of those of retry; each may be left out.
    #retry: {attempts_max: 5, broken_attempts_max: 3, backoff_ms: 500, backoff_ms_max: 30000}
    # Fields of a body that are refused otherwise, and that callers may set.
    #allowed_fields: [priority]
    # Hosts that its servers may fetch files of a request from.
    #media_hosts: ["*.example.com"]
    # One or more servers that serve it.
    deployments:"""


def configuration() -> str:
    """Every key there is, in a file that can be loaded: defaults, and an example where a default is nothing."""
    groups: dict[str, list[catalog.Setting]] = {}
    for setting in sorted(catalog.settings(), key=lambda one: one.is_advanced):
        group, dot, _ = setting.key.rpartition(".")
        groups.setdefault(group if dot else "", []).append(setting)
    entries = _entries()
    blocks = ["\n".join(_members([one for one in groups.pop("") if one.key not in entries], ""))]
    blocks += ["\n".join([f"{group}:", *_members(members, "  ")]) for group, members in groups.items()]
    for name, lines in entries.items():
        blocks.append("\n".join([*_remark(catalog.by_key()[name].about, ""), f"{name}:", *lines]))
    return "```yaml\n" + "\n\n".join(blocks) + "\n```\n"


def _members(members: list[catalog.Setting], indent: str) -> Iterator[str]:
    """The lines of the settings of a group, those that tune the inside last."""
    was_advanced = False
    for one in members:
        if one.is_advanced and not was_advanced:
            yield from _remark(ADVANCED_LINE, indent)
        was_advanced = one.is_advanced
        yield from _remark(one.about, indent)
        is_set = one.default not in (None, "", (), {})
        yield _line(one.key, one.default if is_set else EXAMPLES[one.key], is_set, indent)


def _entries() -> dict[str, list[str]]:
    """The lines of each mapping of entries, with one entry that has every key."""
    settings_page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    guards_page = (DOCS / "guardrails.md").read_text(encoding="utf-8")
    both = _explained(guards_page, "both")

    def entry(kind: type, what: str, page: str, indent: str = "    ") -> list[str]:
        words = _explained(page, f"a {what}") | (both if page is guards_page else {})
        return list(_fields(inspect.type_info(kind), words, SET[what], indent))

    deployment = entry(capacity.ModelDeployment, "deployment", settings_page, "        ")
    return {
        "models": [*MODEL.splitlines(), "      -" + deployment[0][7:], *deployment[1:]],
        "resources": ["  support-chat:", *entry(capacity.ResourceEntry, "resource", settings_page)],
        "tenants": ["  acme:", *entry(capacity.TenantEntry, "tenant", settings_page)],
        "tiers": ["  gold: 4"],
        # It would be imported.
        "hooks": [*_not_in_force(["  house-style:", *entry(guards.HookEntry, "hook", guards_page)], "  ")],
        "guardrails": ["  no-secrets:", *entry(guards.GuardrailEntry, "guardrail", guards_page)],
    }


def _explained(page: str, what: str) -> dict[str, str]:
    """What a table on a page says that each key is for."""
    found = re.search(rf"^\| key of {what} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    assert found, what
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in found[1].splitlines()]
    return {row[0].strip("`"): row[-1] for row in rows}


def _fields(
    kind: inspect.Type, words: dict[str, str], values: dict[str, object], indent: str, under: str = ""
) -> Iterator[str]:
    """The lines of one entry, in the order of its declaration."""
    assert isinstance(kind, inspect.StructType)
    for one in kind.fields:
        key = f"{under}{one.name}"
        inner = catalog.bare(one.type)
        parts = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
        struct = next((part for part in parts if isinstance(part, inspect.StructType)), None)
        if struct is None or key in words:
            default = None if one.default is NODEFAULT else one.default
            value = values.get(key, default)
            is_set = value not in (None, "", ())
            yield from _remark(words[key], indent)
            yield _line(key, value if is_set else NOT_SET[key], is_set, indent)
            continue
        part = [f"{indent}{one.name}:", *_fields(struct, words, values, f"{indent}  ", f"{key}.")]
        yield from part if len(parts) == 1 else _not_in_force(part, indent)


def _not_in_force(lines: list[str], indent: str) -> Iterator[str]:
    """Comment out the keys of a part that has no default."""
    for line in lines:
        bare = line[len(indent) :]
        yield line if bare.lstrip().startswith("# ") else f"{indent}#{bare.replace('#', '', 1)}"


def _line(key: str, value: object, is_set: bool, indent: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = init.quantity(key, value)
    else:
        plain = list(value) if isinstance(value, tuple) else value
        text = (
            yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()
        )
    return f"{indent}{'' if is_set else '#'}{key.rpartition('.')[2]}: {text}"


def _remark(words: str, indent: str) -> list[str]:
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", words).replace("`", "").removesuffix(".")
    return [f"{indent}# {line}" for line in textwrap.wrap(f"{plain[:1].upper()}{plain[1:]}.", COLUMNS - len(indent))]


# ---- commands


def every_command(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command by the words that call it."""
    command = command or typer.main.get_command(commands)
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from every_command(inner, (*path, name))
        else:
            yield (*path, name), inner


def command_reference() -> str:
    return "\n".join(_one_command(path, command) for path, command in every_command())


def _one_command(path: tuple[str, ...], command: Any) -> str:
    paragraphs = [
        re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", command.help.replace("\b", "").strip())
    ]
    words = [part for part in paragraphs if not part.startswith("Example: ")]
    example = next(part.removeprefix("Example: ") for part in paragraphs if part.startswith("Example: "))
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([f"tidegate {' '.join(path)}", *map(_argument, arguments), "[options]"])
    rows = (_parameter(one) for one in command.params if one.name != "help")
    intro = "\n\n".join(words)
    heads = ("option", "default", "what it does")
    return f"### `tidegate {' '.join(path)}`\n\n{intro}\n\n```text\n{usage}\n{example}\n```\n\n{table(heads, rows)}"


def _argument(one: Any) -> str:
    """An argument as a usage line shows it: in brackets where it may be left out."""
    return str(one.metavar if one.required else f"[{one.metavar.strip('[]')}]")


def _parameter(one: Any) -> tuple[str, str, str]:
    is_argument = one.param_type_name == "argument"
    names = _argument(one) if is_argument else ", ".join([*one.opts, *one.secondary_opts])
    value = "" if is_argument or one.is_flag else f" {one.metavar or _choices(one)}"
    if one.required:
        default = "required"
    elif isinstance(one.show_default, str):
        default = one.show_default
    else:
        default = _default(getattr(one.default, "value", one.default))
    return f"`{names}{value}`", "off" if not is_argument and one.is_flag and not one.default else default, one.help


def _choices(one: Any) -> str:
    choices = getattr(getattr(one, "click_type", None) or getattr(one, "type", None), "choices", None)
    if not choices:
        choices = [member.value for member in type(one.default)]
    return "|".join(str(getattr(choice, "value", choice)) for choice in choices)


# ---- routes


class _Still:
    """A clock for an app that is never called."""

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return 0.0


def every_route() -> list[tuple[str, str, str]]:
    """(method, path, scope) of every route of the app; an empty scope is a route that needs no key."""
    # Parts are only taken hold of while the app is built, and never asked.
    nothing = cast(Any, mock.Mock())
    context = WebContext(
        mock.Mock(),
        mock.Mock(),
        Settings(),
        cast(Any, _Still()),
        nothing,
        Wakes(LocalWake(), LocalWake(), LocalWake()),
        lambda: "",
        b"",
        nothing,
        nothing,
        DOCS,
        SCOPES,
        control_token=None,
    )
    guarded: list[Guarded] = []

    def keep(authenticator: Any, limits: Any, entries: list[Guarded]) -> Any:
        guarded.extend(entries)
        return guarded_routes(authenticator, limits, entries)

    with mock.patch.object(web, "guarded_routes", keep):
        app = web.build_app(context)
    scopes = {(entry.method, entry.path): entry.scope for entry in guarded}
    found = []
    for route in app.routes:
        for method in sorted(getattr(route, "methods", None) or ()):
            if method != "HEAD":
                path = cast(Any, route).path
                found.append((method, path, scopes.get((method, path), "")))
    return found


def routes() -> str:
    def scope(path: str, name: str) -> str:
        if path == scrape.PATH:
            return "none, on this machine"
        return " or ".join(f"`{one}`" for one in name.split(" or ")) if name else "none"

    rows = ((f"`{method}`", f"`{path}`", scope(path, name)) for method, path, name in every_route())
    return table(("method", "path", "scope a key needs"), rows)


# ---- metrics


def metrics() -> str:
    rows = (
        (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels) or "none", one.about)
        for one in measured.declared()
    )
    return table(("metric", "kind", "labels", "what it counts"), rows)


# ---- states


MOVES: dict[str, dict[Any, frozenset[Any]]] = {
    "jobs": states.JOB_MOVES,
    "slices": states.SLICE_MOVES,
    "files": states.FILE_MOVES,
    "blobs": states.BLOB_MOVES,
    "workers": states.WORKER_MOVES,
    "job_models": states.JOB_MODEL_MOVES,
    "flows": states.FLOW_MOVES,
    "webhook_deliveries": states.DELIVERY_MOVES,
    "uploads": states.UPLOAD_MOVES,
    "operations": states.OPERATION_MOVES,
}


def diagram(name: str) -> Callable[[], str]:
    def draw() -> str:
        moves = MOVES[name]
        lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves)).value}"]
        for state, targets in moves.items():
            # In the order of declaration, so that the same moves always give the same text.
            lines += [f"    {state.value} --> {target.value}" for target in type(state) if target in targets]
            if not targets:
                lines.append(f"    {state.value} --> [*]")
        return "\n".join([*lines, "```", ""])

    return draw


# ---- rooms


def rooms() -> str:
    """Every package and every module beside the packages, with the first paragraph of its docstring as its duty."""
    packages = {path.parent: f"{path.parent.relative_to(SOURCE).as_posix()}/" for path in SOURCE.rglob("__init__.py")}
    duties = {name: folder / "__init__.py" for folder, name in packages.items() if folder != SOURCE}
    duties |= {path.name: path for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    return table(("room", "duty"), ((f"`{name}`", _duty(duties[name])) for name in sorted(duties)))


def _duty(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


def layers() -> str:
    """The layers that import-linter holds, top to bottom."""
    contracts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    found = [one for one in contracts["contracts"] if one["type"] == "layers"]
    return table(
        ("in", "each knows only those after it"),
        ((f"`{one['containers'][0]}`", " → ".join(f"`{layer}`" for layer in one["layers"])) for one in found),
    )


PARTS: dict[str, Callable[[], str]] = {
    "rooms": rooms,
    "layers": layers,
    "settings": settings,
    "configuration": configuration,
    "commands": command_reference,
    "routes": routes,
    "metrics": metrics,
    **{f"states-{name}": diagram(name) for name in MOVES},
}


def regenerated(page: str) -> str:
    """The page with every generated part as the code says it now."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found['name']]()}\n{found[4]}", page)


def main() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        current = regenerated(page)
        if current != page:
            path.write_text(current, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
