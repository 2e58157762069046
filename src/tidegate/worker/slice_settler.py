"""How leased slices leave a worker: one that has nothing more to do here is done, or goes back to the store. Record tells the store."""

from tidegate.core.nouns import Holding
from tidegate.core.ports import Listener
from tidegate.stages.record import Recorder
from tidegate.worker.leased_work import LeasedSliceState, LeasedWork
from tidegate.worker.trial import Trial


class SliceSettler:
    def __init__(self, leased_work: LeasedWork, trial: Trial, recorder: Recorder, lease_wake: Listener) -> None:
        self._leased_work = leased_work
        self._trial = trial
        self._recorder = recorder
        self._lease_wake = lease_wake

    def settle(self, state: LeasedSliceState) -> None:
        """Pass a slice on to record if it has nothing more to do here."""
        if not self._leased_work.settle(state):
            return
        if self._trial.end_slice(state):
            self._lease_wake.notify()
        leased = state.slice
        if state.left == 0:
            self._recorder.finish_slice(leased.job_id, leased.first, leased.token)
        else:
            wait_ms = self._leased_work.release_wait_ms(state)
            self._recorder.release_slice(leased.job_id, leased.first, leased.token, wait_ms)

    def settle_all(self) -> None:
        for state in self._leased_work.state():
            self.settle(state)

    def drop_all(self) -> None:
        """Send nothing more of any slice; calls in flight go on."""
        for state in self._leased_work.state():
            self._leased_work.drop(state)
        self.settle_all()

    def lose_all(self) -> None:
        """Let go of everything that was leased to an incarnation that is over."""
        self._leased_work.lose_lease()
        self.settle_all()

    def begin_again(self) -> None:
        """Let go of everything for a new incarnation, which has survived nothing yet and writes logs of its own."""
        self.lose_all()
        self._trial.begin_again()
        self._recorder.renew()

    def forget(self, state: LeasedSliceState) -> None:
        """A slice that could not be read is not held after all, and needs nothing from record."""
        self._leased_work.forget(state)
        self._trial.end_slice(state)

    def is_settling(self, holding: Holding) -> bool:
        """Whether record has this slice and the store has not heard of it yet."""
        return self._recorder.is_settling(holding.job_id, holding.first, holding.token)
