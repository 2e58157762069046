"""The places of secrets: environment variables, files or, with a warning, the configuration itself.

`env:NAME` refers to a variable, as does `os.environ/NAME`, which other tools use. `file:PATH`
refers to a file.
"""

from collections.abc import Mapping
from pathlib import Path

from tidegate.core.deployments import Secret
from tidegate.core.errors import SettingsError

SECRET_CHARS_MAX = 4_096
_IN_ENVIRONMENT = ("env:", "os.environ/")


def resolve(text: str, environ: Mapping[str, str]) -> tuple[Secret, bool]:
    """Return the secret behind `env:NAME`, `file:PATH` or a literal, and whether it is literal."""
    name = variable_of(text)
    if name is not None:
        return Secret(_from_environment(name, environ)), False
    path = file_of(text)
    if path is not None:
        return Secret(_from_file(path), text), False
    if not text.isprintable() or len(text) > SECRET_CHARS_MAX:
        raise SettingsError(
            f"must be one line of at most {SECRET_CHARS_MAX:,} printable characters: was it pasted with a line break?"
        )
    return Secret(text), True


def variable_of(text: str) -> str | None:
    """Return the environment variable that a reference names; None if it names none."""
    return next((text.removeprefix(prefix) for prefix in _IN_ENVIRONMENT if text.startswith(prefix)), None)


def file_of(text: str) -> Path | None:
    """Return the file that a reference names; None if it names none."""
    if text.startswith("file:") and not text.startswith("file://"):
        return Path(text[len("file:") :]).expanduser()
    return None


def is_reference(text: str) -> bool:
    """Return whether a text is a reference and not the secret itself."""
    return text.startswith((*_IN_ENVIRONMENT, "file:")) and not text.startswith("file://")


def _from_environment(name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise SettingsError(f"names the environment variable {name}, which is not set; export it first")
    if not value.isprintable() or len(value) > SECRET_CHARS_MAX:
        raise SettingsError(f"names the environment variable {name}, which must hold the secret alone, on one line")
    return value


def _from_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(SECRET_CHARS_MAX + 1)
        value = data.decode().strip()
    except OSError as error:
        raise SettingsError(f"names the file {path}, which cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"names the file {path}, which is not text") from None
    if not value or len(data) > SECRET_CHARS_MAX or not value.isprintable():
        raise SettingsError(f"names the file {path}, which must hold the secret alone, on one line")
    return value
