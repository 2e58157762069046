"""Plug-ins of the scheduler: what is accepted, and what is refused at start with a sentence that helps."""

import pytest

from tests.conftest import OwnModule
from tidegate.core.errors import SettingsError
from tidegate.core.schedule import JobView, QueueView
from tidegate.settings.plugins import load_queue_order, load_rank

PLUGIN = """
number = 7
def rank(job): return job.left_units
def compare(one, other): return (one.created_at > other.created_at) - (one.created_at < other.created_at)
def with_default(job, factor=2): return -factor * job.left_units
class Ranks:
    @staticmethod
    def inner(job): return 1
async def waits(job): return 1
def words(job): return "high"
def nan(job): return float("nan")
def fails(job): return job.no_such_thing
def three(one, two, three): return 0
def lopsided(one, other): return 1
def nothing(): return 0
def order(queues): return [queue.queue for queue in reversed(queues)]
def text(queues): return "default"
def numbers(queues): return [1, 2]
def none(queues): return None
"""
JOBS = [
    JobView(f"j{number}", "m", "t", "default", 10 - number, 99, None, 100 * number, 100 * number, 0, 1, None, None)
    for number in range(3)
]


@pytest.fixture
def plugin(own_module: OwnModule) -> str:
    return own_module(PLUGIN)


def test_a_number_a_comparator_and_a_default_argument(plugin: str) -> None:
    assert [job.job_id for job in sorted(JOBS, key=load_rank(f"{plugin}:rank"))] == ["j0", "j1", "j2"]
    assert [job.job_id for job in sorted(JOBS, key=load_rank(f"{plugin}:compare"))] == ["j2", "j1", "j0"]
    assert [job.job_id for job in sorted(JOBS, key=load_rank(f"{plugin}:with_default"))] == ["j2", "j1", "j0"]
    assert load_rank(f"{plugin}:Ranks.inner")(JOBS[0]) == 1


def test_an_order_of_queues(plugin: str) -> None:
    views = [QueueView("a", 1, 1, 1, 1, None), QueueView("b", 1, 1, 1, 1, None)]
    assert load_queue_order(f"{plugin}:order")(views) == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_colon", "write it as package.module:name"),
        (":rank", "write it as package.module:name"),
        ("PLUGIN:", "write it as package.module:name"),
        ("no_such_package.module:rank", "put the directory that holds no_such_package on PYTHONPATH"),
        ("PLUGIN_broken:rank", "No module named 'nothing_of_this_name'"),
        ("PLUGIN:absent", "has no 'absent'"),
        ("PLUGIN:number", "is a int, not a function"),
        ("PLUGIN:waits", "write it with a plain def"),
        ("PLUGIN:words", "it returned 'high', which is no number"),
        ("PLUGIN:nan", "it returned nan, which is no number"),
        ("PLUGIN:fails", "failed on a sample job: AttributeError"),
        ("PLUGIN:three", "takes 3 arguments"),
        ("PLUGIN:nothing", "takes 0 arguments"),
        ("PLUGIN:lopsided", "the opposite sign"),
    ],
)
def test_a_bad_rank_is_refused_with_a_reason(plugin: str, name: str, says: str) -> None:
    with pytest.raises(SettingsError, match=r"scheduler\.rank") as refused:
        load_rank(name.replace("PLUGIN", plugin))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text", "it returned the text 'default', not a list of names"),
        ("numbers", "which are not all names"),
        ("none", "TypeError"),
        ("compare", "takes 2 arguments"),
        ("fails", "failed on sample queues"),
    ],
)
def test_a_bad_order_of_queues_is_refused_with_a_reason(plugin: str, name: str, says: str) -> None:
    with pytest.raises(SettingsError, match=r"scheduler\.queue_order") as refused:
        load_queue_order(f"{plugin}:{name}")
    assert says in str(refused.value)
