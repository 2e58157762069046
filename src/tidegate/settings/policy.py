"""Turns the scheduler's settings into its policy, plug-ins and all."""

import dataclasses
import functools
from collections.abc import Iterator

from tidegate.core.errors import SettingsError
from tidegate.core.schedule.policy import Mode, Policy, RankKey
from tidegate.core.schedule.queues import QueueOrder, StrictOrder, WeightedOrder
from tidegate.core.schedule.switch import Switch
from tidegate.settings.groups import Settings
from tidegate.settings.plugins import load_queue_order, load_rank
from tidegate.settings.yaml_file import KeyPath

NO_SHADOW = "none"


def schedule_policy(settings: Settings) -> Policy:
    """Every knob of the scheduler as the settings have it."""
    scheduler = settings.scheduler
    return Policy(
        mode=Mode(scheduler.mode),
        shadow_mode=None if scheduler.shadow_mode == NO_SHADOW else Mode(scheduler.shadow_mode),
        flows_per_decision_max=scheduler.flows_per_decision_max,
        jobs_per_flow_max=scheduler.jobs_per_flow_max,
        in_flight_units_max=scheduler.in_flight_units_max,
        urgent_share=scheduler.urgent_share,
        age_units_per_s=scheduler.age_units_per_s,
        age_units_max=scheduler.age_units_max,
        large_units=scheduler.large_units,
        large_interval_ms=scheduler.large_interval_ms,
        fast_lane=scheduler.fast_lane,
        fast_lane_share=scheduler.fast_lane_share,
        fast_lane_units=scheduler.fast_lane_units,
        rank=_rank(scheduler.rank),
        queue_order=_queue_order(settings),
    )


def switched(policy: Policy, switch: Switch) -> Policy:
    """The policy as it was switched at run time. A name that this program does not know is a newer one's: the settings stand."""
    known = {mode.value: mode for mode in Mode}
    shadow = None if switch.shadow_mode == NO_SHADOW else known.get(switch.shadow_mode, policy.shadow_mode)
    return dataclasses.replace(policy, mode=known.get(switch.mode, policy.mode), shadow_mode=shadow)


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """What is wrong with the functions that the settings name."""
    for name, made in (
        ("rank", lambda: _rank(settings.scheduler.rank)),
        ("queue_order", lambda: _queue_order(settings)),
    ):
        try:
            made()
        except SettingsError as error:
            yield ("scheduler", name), f"cannot be used: {str(error).removeprefix(f'scheduler.{name}: ')}"


@functools.cache
def _rank(path: str) -> RankKey | None:
    return load_rank(path) if path else None


@functools.cache
def _own_order(path: str) -> QueueOrder:
    return load_queue_order(path)


def _queue_order(settings: Settings) -> QueueOrder:
    scheduler = settings.scheduler
    match scheduler.queue_order:
        case "strict":
            return StrictOrder(scheduler.queues)
        case "weighted":
            return WeightedOrder(scheduler.queue_weights)
        case path:
            return _own_order(path)
