"""LiteLLM's proxy, to be measured beside ours: installed from a lock of its own into an environment of its own, started and stopped here.

It gets one worker process, no database and no logging of requests: the least that it can do for a call.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

LOCK = Path(__file__).with_name("litellm.lock")
HOME = Path("build/litellm")
START_S = 180.0
CONFIGURATION = """
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "{upstream}", api_key: none}}
litellm_settings: {{telemetry: false, set_verbose: false, disable_end_user_cost_tracking: true}}
general_settings: {{disable_spend_logs: true}}
"""


def installed() -> Path:
    """Its command, after it was installed if it was not."""
    command, stamp = HOME / "bin" / "litellm", HOME / f".locked-{len(LOCK.read_bytes())}"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        pip = [str(HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "-r", str(LOCK)], check=True, stderr=subprocess.DEVNULL)
        stamp.touch()
    return command.absolute()


@contextlib.contextmanager
def litellm_proxy(upstream: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a LiteLLM proxy in front of this upstream and the header it wants, while it runs."""
    command = installed()
    key = f"sk-{secrets.token_hex(24)}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(CONFIGURATION.format(upstream=upstream))
        environment = os.environ | {
            "LITELLM_MASTER_KEY": key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
        }
        arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen([str(command), *arguments], env=environment, stdout=log, stderr=log)
            try:
                _until_alive(process, port, Path(directory) / "log")
                yield f"http://127.0.0.1:{port}/v1", {"Authorization": f"Bearer {key}"}
            finally:
                process.terminate()
                process.wait()


def _until_alive(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).read()
            return
        time.sleep(0.5)
    raise RuntimeError(f"LiteLLM's proxy did not start:\n{log.read_text(errors='replace')[-2000:]}")
