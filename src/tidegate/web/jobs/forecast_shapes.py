"""A job's size and expected end, as doors show them."""

import msgspec


class EtaShown(msgspec.Struct):
    """When the batch is expected to be done, in unix seconds: with even odds by `p50`, and in 19 of
    20 cases by `p95`.
    """

    p50: int | None
    p95: int | None


class Forecast(msgspec.Struct, frozen=True):
    """A batch's size and expected end, as far as they are known."""

    slack_seconds: int | None = None
    eta: EtaShown | None = None
    warnings: tuple[str, ...] = ()
    work_units: int | None = None


UNKNOWN = Forecast()
