"""The wheel as users get it: installed in a clean environment of each Python without a compiler, it runs what the README shows."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")


def main() -> int:
    [wheel] = (REPOSITORY / "dist").glob("tidegate-*.whl")
    found = {version: _interpreter(version) for version in PYTHONS}
    with ThreadPoolExecutor() as side_by_side:
        tries = [side_by_side.submit(_try, wheel, version, python) for version, python in found.items() if python]
    for one in tries:
        one.result()
    missing = [version for version, python in found.items() if not python]
    if missing:
        print(f"not tried, because there is no such interpreter: Python {', '.join(missing)}")
    return 2 if len(missing) == len(PYTHONS) else 0


def _interpreter(version: str) -> str:
    """Return where a Python is, or nothing. Commands of pyenv need its version in a variable."""
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"PYENV_VERSION": version}
        )
    except FileNotFoundError:
        return ""
    return asked.stdout.strip()


def _try(wheel: Path, version: str, python: str) -> None:
    place = REPOSITORY / "build" / "wheel" / version
    subprocess.run([python, "-m", "venv", "--clear", str(place)], check=True)
    # The SDK is there because the README shows it.
    install = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--only-binary", ":all:", f"{wheel}", "openai"], check=True, cwd="/")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", "README", "tests/docs/test_commands_run.py"]
    subprocess.run(command, check=True, cwd=REPOSITORY, env=os.environ | {"READER_BIN": str(place / "bin")})
    print(f"Python {version}: installed without a compiler, the README's commands run", flush=True)


if __name__ == "__main__":
    sys.exit(main())
