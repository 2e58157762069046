"""The verbs that change one job, as one group: an operation runs them inside its own transaction."""

from tidegate.store.job_controls import RunningJobs
from tidegate.store.jobs import Jobs
from tidegate.store.operated import OperatedStore
from tidegate.store.outcomes import Outcomes
from tidegate.store.retries import Retries


class ChangeableJobs(Jobs, RunningJobs, OperatedStore, Outcomes, Retries):
    """Jobs, whose verbs need nothing of the Store but a transaction."""
