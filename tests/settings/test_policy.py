"""The scheduler's settings become its policy; functions of an operator's own are tried before anything depends on them."""

import msgspec
import pytest

from tests.conftest import OwnModule
from tidegate.core.errors import SettingsError
from tidegate.core.schedule.policy import Mode, ModeOverride, Policy
from tidegate.core.schedule.queues import QueueView, StrictOrder, WeightedOrder
from tidegate.core.schedule.snapshot import JobView
from tidegate.settings import load, schedule_policy, switched

PLUGIN = """\
number = 5
def oldest(job): return job.created_at
def smaller(one, other): return one.left_units - other.left_units
def breaks(job): raise RuntimeError("no")
def nothing(job): return None
def words(one, other): return "first"
def always(one, other): return -1
def turned(views): return [view.queue for view in reversed(views)]
def text(views): return "default"
def numbers(views): return [1, 2]
"""


@pytest.fixture
def plugin(own_module: OwnModule) -> str:
    return own_module(PLUGIN)


def policy_with(**values: object) -> Policy:
    return schedule_policy(load(None, None, {f"scheduler.{key}": value for key, value in values.items()}, {}).settings)


def test_the_defaults_are_the_scheduler_s_own() -> None:
    settings = load(None, None, {}, {}).settings
    assert schedule_policy(settings) == msgspec.structs.replace(Policy(), queue_order=StrictOrder(("default",)))


def test_every_knob_that_has_a_setting_is_turned_by_it() -> None:
    given: dict[str, object] = {
        "mode": "fair_share_v1",
        "shadow_mode": "fifo_v1",
        "flows_per_decision_max": 7,
        "jobs_per_flow_max": 6,
        "in_flight_units_max": 5,
        "urgent_share": 0.25,
        "age_units_per_s": 2.0,
        "age_units_max": 3,
        "large_units": 4_000,
        "large_interval_ms": 11,
        "fast_lane": True,
        "fast_lane_share": 0.2,
        "fast_lane_units": 12,
    }
    turned = policy_with(**given)
    for name, value in given.items():
        assert getattr(turned, name) == value != getattr(Policy(), name), name


def test_queues_in_their_order_or_by_weight() -> None:
    assert policy_with(queues="express,default").queue_order == StrictOrder(("express", "default"))
    weighted = policy_with(queues="express,default", queue_order="weighted", queue_weights="{express: 3}")
    assert weighted.queue_order == WeightedOrder({"express": 3.0})


def job(job_id: str, created_at: int, units: int) -> JobView:
    return JobView(job_id, "m", "tenant:a", "default", created_at, 90_000, None, units, units, 0, 100, None, None)


def test_a_rank_of_ones_own(plugin: str) -> None:
    jobs = [job("late and small", 9, 10), job("early and large", 1, 1_000)]
    by_age = policy_with(rank=f"{plugin}:oldest").rank
    by_size = policy_with(rank=f"{plugin}:smaller").rank
    assert by_age is not None
    assert by_size is not None
    assert [one.job_id for one in sorted(jobs, key=by_age)] == ["early and large", "late and small"]
    assert [one.job_id for one in sorted(jobs, key=by_size)] == ["late and small", "early and large"]


def test_an_order_of_ones_own(plugin: str) -> None:
    order = policy_with(queue_order=f"{plugin}:turned").queue_order
    views = [QueueView(name, 1, 1, 0, 0, None) for name in ("a", "b")]
    assert list(order(views)) == ["b", "a"]


@pytest.mark.parametrize(
    ("setting", "name", "says"),
    [
        ("rank", "absent", "has no 'absent'"),
        ("rank", "number", "is a int, not a function"),
        ("rank", "breaks", "failed on a sample job: RuntimeError: no"),
        ("rank", "nothing", "which is no number"),
        ("rank", "words", "which is no number"),
        ("rank", "always", "a comparator must give 0 for a job and itself"),
        ("queue_order", "oldest", "failed on sample queues: AttributeError"),
        ("queue_order", "text", "not a list of names"),
        ("queue_order", "numbers", "which are not all names"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(
    plugin: str, setting: str, name: str, says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(None, None, {f"scheduler.{setting}": f"{plugin}:{name}"}, {})
    assert str(caught.value).startswith(f"scheduler.{setting} cannot be used: {plugin}")
    assert says in str(caught.value)


def test_a_module_that_cannot_be_imported_is_refused(plugin: str) -> None:
    for module, says in (("no_such_module_at_all", "cannot be imported"), (f"{plugin}_broken", "nothing_of_this_name")):
        with pytest.raises(SettingsError, match=says):
            load(None, None, {"scheduler.rank": f"{module}:rank"}, {})


def test_a_switch_overrules_the_settings_until_it_is_empty() -> None:
    configured = Policy(mode=Mode.FAIR_SHARE, shadow_mode=Mode.FIFO)
    assert switched(configured, ModeOverride()) == configured
    assert switched(configured, ModeOverride("smart_v1", "none")) == Policy(mode=Mode.SMART)
    assert switched(configured, ModeOverride("", "slice_v1")) == Policy(mode=Mode.FAIR_SHARE, shadow_mode=Mode.SLICE)
    assert switched(configured, ModeOverride("smart_v9", "smart_v9")) == configured
