"""The options of the simulated engine, with their units and bounds."""

from typing import Literal

import msgspec

from tidegate.simulate.engine.faults import rates_from
from tidegate.simulate.engine.model import EngineLimits

EngineMode = Literal["instant", "fixed", "modelled"]

PROCESS_COUNT_MAX = 64
EMBEDDING_DIMENSIONS_MAX = 16384


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one simulated engine; the defaults are an H200 that answers at once."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose; the printed address has the real one."""
    mode: EngineMode = "instant"
    latency_ms: float = 0.0
    """The duration of every answer in `fixed` mode."""
    calls_log: str | None = None
    calls_log_fsync: bool = False
    faults: dict[str, float] = {}
    """The share of calls for each behaviour (`429`, `503:ra=1`, `reset`...)."""
    seed: int = 0
    processes: int = 1
    max_num_seqs: int = 256
    prefill_chunk_tokens: int = 2048
    kv_blocks: int = 32768
    priority_scheduling: bool = False
    embedding_dimensions: int = 64
    answer_tokens_mean: int = 64
    """The mean length of answers.

    They are from half to one and a half times as long, unless the request bounds them.
    """
    api_key: str | None = None
    body_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("latency_ms", 0, 3_600_000),
            ("processes", 1, PROCESS_COUNT_MAX),
            ("max_num_seqs", 1, 65536),
            ("prefill_chunk_tokens", 1, 1 << 20),
            ("kv_blocks", 1, 1 << 24),
            ("embedding_dimensions", 1, EMBEDDING_DIMENSIONS_MAX),
            ("answer_tokens_mean", 1, 65536),
            ("body_bytes_max", 1, 1 << 32),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, not {value}")
        if self.mode == "modelled" and self.processes > 1:
            raise ValueError("modelled mode is one scheduler over one cache: use processes=1")
        if self.latency_ms and self.mode != "fixed":
            raise ValueError("latency_ms is for fixed mode: say mode=fixed")
        rates_from(self.faults)

    def limits(self) -> EngineLimits:
        """Return the size of the modelled engine."""
        return EngineLimits(
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            kv_blocks=self.kv_blocks,
            priority_scheduling=self.priority_scheduling,
        )
