"""The layers of settings: defaults, one YAML file, the environment, the command line.

`load` merges them, and the last one that gives a value wins. It checks each value and then how
values fit together (a heartbeat into a lease, for example), and reports all problems at once.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidegate.core.deployments import Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import catalog, rules, secrets
from tidegate.settings.check import Checker, RefusedSettings, from_text, nearest
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath

if TYPE_CHECKING:
    from tidegate.settings.yaml_file import YamlFile

CONFIG_VARIABLE = "TIDEGATE_CONFIG"
PROBLEMS_SHOWN_MAX = 20
DEFAULT = "default"
OPTION = "option"

# Kubernetes gives every pod variables for a Service called tidegate or tidegate-something.
_SERVICE_LINK_NAME = re.compile(
    r"TIDEGATE(_[A-Z0-9_]+)?_(SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)"
)
_REFERRED = re.compile(r"(?:env:|os\.environ/)([A-Za-z0-9_]+)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class Loaded(msgspec.Struct, frozen=True):
    """Checked settings, the origin of each value, warnings for the operator and the file's path."""

    settings: Settings
    origins: dict[str, str]
    warnings: tuple[str, ...]
    path: Path | None = None


NOT_LOOKED_UP = "not-looked-up"
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"


class _Layers:
    """The values given so far as one tree, each with its origin."""

    def __init__(self, environ: Mapping[str, str], *, calls_models: bool) -> None:
        self.tree: dict[str, object] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []
        self.problems: list[str] = []
        self._environ = environ
        self._calls_models = calls_models
        self._option_names: Mapping[str, str] = {}
        self._file: YamlFile | None = None

    def add(self, path: KeyPath, text: str) -> None:
        name = ".".join(str(part) for part in path)
        origin = self.origin_of(path)
        problem = f"{name} {text} [{origin}]"
        if origin == DEFAULT:
            problem = f"{name} {text}"
        elif origin in self._option_names.values():
            problem = f"{origin} {text}"
        # One option may stand for two settings.
        if problem not in self.problems:
            self.problems.append(problem)

    def origin_of(self, path: KeyPath) -> str:
        """Return the origin of the value at this path or around it; in a file the nearest line."""
        names = (".".join(str(part) for part in path[:length]) for length in range(1, len(path) + 1))
        given = next((self.origins[name] for name in names if name in self.origins), None)
        is_from_file = self._file is not None and (given or "").startswith(f"{self._file.name}:")
        if given is not None and not is_from_file:
            return given
        if self._file is not None and (is_from_file or path in self._file.lines):
            return f"{self._file.name}:{self._file.line_of(path)}"
        return DEFAULT

    def read_file(self, path: Path) -> None:
        # The parser takes a while to load, and a run without a file does not need it.
        from tidegate.settings import yaml_file

        self._file = taken = yaml_file.read(path)
        if taken.values is None:
            return
        if not isinstance(taken.values, dict):
            raise SettingsError(f"{path} must hold keys and values, such as `server: {{port: 8080}}`.")
        self.tree = taken.values
        for key in catalog.by_key():
            parts = tuple(key.split("."))
            if parts in taken.lines and _get(self.tree, parts) is not None:
                self.origins[key] = f"{taken.name}:{taken.lines[parts]}"

    def read_environment(self, options: Mapping[str, object]) -> None:
        """Take the variables that are settings.

        Refuse others with our prefix, unless the file, a variable or an option refers to them.
        """
        known = {setting.variable: setting for setting in catalog.settings()}
        referred = set(_REFERRED.findall(f"{self.tree!r} {list(options.values())!r}"))
        referred |= {found[1] for value in self._environ.values() if (found := _REFERRED.match(value))}
        for name, text in sorted(self._environ.items()):
            if not name.startswith("TIDEGATE_") or name == CONFIG_VARIABLE or not text:
                continue
            if _SERVICE_LINK_NAME.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(text)):
                continue
            if (setting := known.get(name)) is not None:
                self.put(setting.key, from_text(setting.type, text, name), name)
            elif name not in referred:
                self.problems.append(
                    f"{name} is not a known variable; {nearest(name, [*known, CONFIG_VARIABLE])} [environment]"
                )

    def read_options(self, options: Mapping[str, object], names: Mapping[str, str]) -> None:
        """Take the command line's options by key; `names` are the options as they were typed."""
        self._option_names = names
        known = catalog.by_key()
        for key, value in options.items():
            if value is None:
                continue
            if key not in known:
                raise SettingsError(f"{key} is not a known setting; {nearest(key, list(known))}")
            self.put(
                key, from_text(known[key].type, value, key) if isinstance(value, str) else value, names.get(key, OPTION)
            )

    def put(self, key: str, value: object, origin: str) -> None:
        *groups, name = key.split(".")
        place = self.tree
        for group in groups:
            inner = place.get(group)
            if inner is None:
                place[group] = inner = {}
            if not isinstance(inner, dict):
                return  # The file's own value for this group is already wrong and will be reported.
            place = inner
        place[name] = value
        self.origins[key] = origin

    def resolve_secret(self, text: str, path: KeyPath) -> Secret:
        if (
            not self._calls_models
            and path[-1] == "api_key"
            and path[0] in ("models", "upstream")
            and secrets.is_reference(text)
        ):
            # Only a process that calls model servers needs their keys; others may not have them.
            return Secret(NOT_LOOKED_UP)
        secret, is_literal = secrets.resolve(text, self._environ)
        origin = self.origin_of(path)
        if is_literal and not origin.startswith("TIDEGATE_") and rules.is_worth_hiding(path, text):
            name = ".".join(str(part) for part in path)
            self.warnings.append(f"{name} [{origin}] holds a secret in plain text; use env:NAME or file:PATH instead.")
        return secret


def openai_names(environ: Mapping[str, str] | None = None) -> tuple[str | None, str | None]:
    """Return the address in OPENAI_BASE_URL, and a reference to OPENAI_API_KEY; None if not set."""
    surroundings: Mapping[str, str] = os.environ if environ is None else environ
    key = f"env:{OPENAI_KEY_VARIABLE}" if surroundings.get(OPENAI_KEY_VARIABLE) else None
    return surroundings.get("OPENAI_BASE_URL") or None, key


def load(
    config_path: Path | None = None,
    data_dir: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    calls_models: bool = True,
    option_names: Mapping[str, str] | None = None,
) -> Loaded:
    """Return the settings of this process; raise SettingsError with all problems, one on each line.

    `overrides` are the command line's options by key (`{"server.port": 9000}`); None means not
    given. A problem with one is reported under its name in `option_names`. Without `calls_models`
    the keys of model servers are not looked up.
    """
    surroundings: Mapping[str, str] = os.environ if environ is None else environ
    layers = _Layers(surroundings, calls_models=calls_models)
    if config_path is None and surroundings.get(CONFIG_VARIABLE):
        config_path = Path(surroundings[CONFIG_VARIABLE])
    if config_path is not None:
        config_path = config_path.expanduser()
        layers.read_file(config_path)
    options = {**(overrides or {}), "data": None if data_dir is None else str(data_dir)}
    layers.read_environment(options)
    layers.read_options(options, option_names or {})
    settings = _checked(layers)
    origins = {key: layers.origins.get(key, DEFAULT) for key in catalog.by_key()}
    return Loaded(settings, origins, tuple(layers.warnings), config_path)


def _checked(layers: _Layers) -> Settings:
    try:
        settings = Checker(layers, layers.resolve_secret).typed_value(catalog.declaration(), layers.tree, ())
    except RefusedSettings:
        raise _refusal(layers.problems) from None
    assert isinstance(settings, Settings)
    settings = rules.completed(settings)
    for path, text in rules.problems(settings):
        layers.add(path, text)
    if layers.problems:
        raise _refusal(layers.problems)
    layers.warnings += rules.warnings(settings)
    return settings


def _refusal(problems: list[str]) -> SettingsError:
    shown = problems[:PROBLEMS_SHOWN_MAX]
    if len(problems) > len(shown):
        shown.append(f"… and {len(problems) - len(shown)} more")
    return SettingsError("\n".join(shown))


def _get(tree: object, path: KeyPath) -> object:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
