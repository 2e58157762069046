"""The mode as an operator switched it at run time: kept in the store, so that every process follows; empty leaves what the settings say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModeOverride:
    """Names of modes; `shadow_mode` may also be `none`."""

    mode: str = ""
    shadow_mode: str = ""
