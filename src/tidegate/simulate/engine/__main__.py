"""The command `python -m tidegate.simulate.engine`, with a flag for each option of the engine."""

import argparse
import sys

import uvloop

from tidegate.simulate.engine.faults import rate_from_option
from tidegate.simulate.engine.options import EngineOptions
from tidegate.simulate.engine.server import serve


def main(arguments: list[str] | None = None) -> int:
    """Parse the flags and serve; print the reason if that fails."""
    defaults = EngineOptions()
    parser = argparse.ArgumentParser(prog="python -m tidegate.simulate.engine", description="A simulated model server.")
    parser.add_argument("--mode", choices=("instant", "fixed", "modelled"), default=defaults.mode)
    parser.add_argument(
        "--fault", action="append", default=[], help="behaviour and rate, like 429=0.05; may be repeated"
    )
    for flag in ("calls_log_fsync", "priority_scheduling"):
        parser.add_argument("--" + flag.replace("_", "-"), action="store_true")
    for name in ("host", "calls_log", "api_key"):
        parser.add_argument("--" + name.replace("_", "-"), default=getattr(defaults, name))
    parser.add_argument("--latency-ms", type=float, default=defaults.latency_ms)
    for name in (
        "port",
        "seed",
        "processes",
        "max_num_seqs",
        "prefill_chunk_tokens",
        "kv_blocks",
        "embedding_dimensions",
        "answer_tokens_mean",
        "body_bytes_max",
    ):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(defaults, name))
    given = vars(parser.parse_args(arguments))
    try:
        faults = dict(rate_from_option(text) for text in given.pop("fault"))
        uvloop.run(serve(EngineOptions(faults=faults, **given)))
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"simulated engine: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
