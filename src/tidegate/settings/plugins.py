"""An operator's own code, named by import path. Code that cannot be used is refused at start.

- A rank is a function of one job (a number, least first) or of two jobs (a comparator: negative if
  the first goes first). It is tried on sample jobs.
- An order of queues takes the state of each queue and returns their names, best first. It is tried
  on sample queues.
- A hook takes a body and the call's owner and target. It may call other services, so it is not
  tried before it is needed.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tidegate.core.errors import SettingsError
from tidegate.core.hooks import Own
from tidegate.core.schedule.policy import RankKey
from tidegate.core.schedule.queues import QueueOrder, QueueView
from tidegate.core.schedule.snapshot import JobView

_SAMPLES = (
    JobView("job_a", "model", "tenant:a", "default", 1_000, 90_000, None, 5_000, 4_000, 500, 1_000, None, None),
    JobView("job_b", "model", "tenant:b", "default", 2_000, 80_000, 60_000, 9_000, 9_000, 0, 3_000, 1_500, 12.5),
)
_QUEUES = (QueueView("default", 3, 9_000, 500, 1_000, None), QueueView("second", 1, 100, 0, 2_000, 1_500))


def load_rank(path: str) -> RankKey:
    """Return the rank at this path as a sort key for jobs.

    The key raises an error for no number.
    """
    found = _load("scheduler.rank", path)
    count = _parameters("scheduler.rank", path, found)
    if count == 1:
        key: RankKey = functools.partial(_number, found)
    elif count == 2:
        key = functools.cmp_to_key(functools.partial(_compared, found))
    else:
        raise SettingsError(
            f"scheduler.rank: {path} takes {count} arguments; write it as rank(job) -> number, or as compare(one, other) -> number"
        )
    try:
        sorted(_SAMPLES, key=key)
        if count == 2:
            _check_comparator(found)
    except Exception as fault:
        raise SettingsError(
            f"scheduler.rank: {path} failed on a sample job: {type(fault).__name__}: {fault}; "
            "it is given tidegate.core.schedule.JobView and must return a number"
        ) from fault
    return key


def load_queue_order(path: str) -> QueueOrder:
    """Return the order of queues at this path."""
    found = _load("scheduler.queue_order", path)
    count = _parameters("scheduler.queue_order", path, found)
    if count != 1:
        raise SettingsError(
            f"scheduler.queue_order: {path} takes {count} arguments; write it as order(queues) -> names, best first"
        )
    order: QueueOrder = functools.partial(_names, found)
    try:
        order(_QUEUES)
    except Exception as fault:
        raise SettingsError(
            f"scheduler.queue_order: {path} failed on sample queues: {type(fault).__name__}: {fault}; "
            "it is given a sequence of tidegate.core.schedule.QueueView and must return their names, best first"
        ) from fault
    return order


def load_hook(setting: str, path: str) -> Own:
    """Return the hook or guardrail at this path: a function or coroutine with two arguments."""
    found = _load(setting, path, may_wait=True)
    count = _parameters(setting, path, found)
    if count != 2:
        raise SettingsError(
            f"{setting}: {path} takes {count} arguments; write it as hook(body, about) -> None or the changed body"
        )
    return found


def _load(setting: str, path: str, *, may_wait: bool = False) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise SettingsError(f"{setting}: {path!r} is no import path; write it as package.module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as fault:
        raise SettingsError(
            f"{setting}: {module_name} cannot be imported: {type(fault).__name__}: {fault}; "
            "install it in the environment that Tidegate runs in, or put the directory that holds "
            f"{module_name.partition('.')[0]} on PYTHONPATH"
        ) from fault
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise SettingsError(f"{setting}: {module_name} has no {name!r}; name a function that it defines")
    if not callable(found):
        raise SettingsError(f"{setting}: {path} is a {type(found).__name__}, not a function; name a function")
    if inspect.isasyncgenfunction(found) or inspect.isgeneratorfunction(found):
        raise SettingsError(f"{setting}: {path} yields; write it with return")
    if inspect.iscoroutinefunction(found) and not may_wait:
        raise SettingsError(
            f"{setting}: {path} is a coroutine; a choice waits for nothing, so write it with a plain def"
        )
    function: Callable[..., Any] = found
    return function


def _parameters(setting: str, path: str, found: Callable[..., Any]) -> int:
    """Return how many arguments a function needs."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        raise SettingsError(f"{setting}: it is not known what {path} takes; write a plain function") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [parameter for parameter in signature.parameters.values() if parameter.default is parameter.empty]
    return sum(1 for parameter in needed if parameter.kind in kinds)


def _number(rank: Callable[[JobView], Any], job: JobView) -> float:
    value = rank(job)
    if not isinstance(value, int | float) or value != value:
        raise TypeError(f"it returned {value!r}, which is no number")
    return value


def _compared(compare: Callable[[JobView, JobView], Any], one: JobView, other: JobView) -> int:
    value = compare(one, other)
    if not isinstance(value, int | float) or value != value:
        raise TypeError(f"it returned {value!r}, which is no number")
    return (value > 0) - (value < 0)


def _check_comparator(compare: Callable[[JobView, JobView], Any]) -> None:
    one, other = _SAMPLES
    if _compared(compare, one, one) != 0 or _compared(compare, one, other) != -_compared(compare, other, one):
        raise ValueError("a comparator must give 0 for a job and itself, and the opposite sign the other way round")


def _names(order: Callable[[Sequence[QueueView]], Any], queues: Sequence[QueueView]) -> list[str]:
    named = order(queues)
    if isinstance(named, str | bytes):
        raise TypeError(f"it returned the text {named!r}, not a list of names")
    names = list(named)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"it returned {names!r}, which are not all names")
    return names
