"""The verbs that change one job, as one group.

An operation runs them inside its own transaction.
"""

from tidegate.store.jobs.job_controls import RunningJobs
from tidegate.store.jobs.jobs import Jobs
from tidegate.store.jobs.retries import Retries
from tidegate.store.operators.operated import OperatedStore
from tidegate.store.road.publishing import PublishedJobs


class ChangeableJobs(Jobs, RunningJobs, OperatedStore, PublishedJobs, Retries):
    """The verbs about jobs that need only a transaction of the Store."""
