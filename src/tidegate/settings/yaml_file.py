"""One YAML file as plain values, with the line of each. This module knows no setting.

An operator's mistake must become one clear sentence. So sizes are bounded, a key given twice is an
error, and no part of the file is ever executed.
"""

from pathlib import Path

import yaml

from tidegate.core.errors import SettingsError
from tidegate.settings.key_path import KeyPath

FILE_BYTES_MAX = 4 << 20
NODES_MAX = 200_000
DEPTH_MAX = 32


class YamlFile:
    """The values of one file, and the line of each by its path."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: object = None
        self.lines: dict[KeyPath, int] = {}
        self._nodes_left = NODES_MAX
        self._loader = yaml.SafeLoader("")

    def line_of(self, path: KeyPath) -> int | None:
        """Return the line of this value, or of the nearest value around it."""
        for length in range(len(path), -1, -1):
            if (line := self.lines.get(path[:length])) is not None:
                return line
        return None

    def node_value(self, node: yaml.Node, path: KeyPath) -> object:
        self._nodes_left -= 1
        line = node.start_mark.line + 1
        if self._nodes_left < 0 or len(path) > DEPTH_MAX:
            raise SettingsError(
                f"{self.name}:{line}: the file is nested too deeply or too large to be a configuration."
            )
        self.lines.setdefault(path, line)
        if isinstance(node, yaml.MappingNode):
            return self._take_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.node_value(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._construct(node)

    def _take_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                raise SettingsError(f"{self.name}:{line}: a key must be a plain word.")
            key = key_node.value
            if key in values:
                raise SettingsError(f"{self.name}:{line}: `{key}` is given twice; keep one of the two.")
            self.lines[(*path, key)] = line
            values[key] = self.node_value(value_node, (*path, key))
        return values

    def _construct(self, node: yaml.Node) -> object:
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            line = node.start_mark.line + 1
            raise SettingsError(
                f"{self.name}:{line}: this value cannot be read ({_problem(error)}); quote it."
            ) from None


def read(path: Path) -> YamlFile:
    """Return the file at this path. For a missing or broken one, raise a clear SettingsError."""
    try:
        with path.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise SettingsError(f"There is no configuration file {path}; check --config.") from None
    except OSError as error:
        raise SettingsError(f"The configuration file {path} cannot be read: {error.strerror or error}.") from None
    if len(data) > FILE_BYTES_MAX:
        raise SettingsError(
            f"The configuration file {path} is larger than {FILE_BYTES_MAX} bytes: is it the right file?"
        )
    return parse(data, str(path))


def parse(data: bytes | str, name: str) -> YamlFile:
    """Parse YAML; error messages call it `name`."""
    taken = YamlFile(name)
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name} is not UTF-8 text (byte {error.start}).") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{name}{line} is not valid YAML: {_problem(error)}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{name} is not valid YAML: {_problem(error)}.") from None
    if node is not None:
        taken.values = taken.node_value(node, ())
    return taken


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return str(error.problem or error.context or "it cannot be parsed")
    return str(error).splitlines()[0] if str(error) else "it cannot be parsed"
