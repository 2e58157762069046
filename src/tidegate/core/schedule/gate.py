"""The model gate: which models can take anything now. A closed model is passed over with its reason and never blocks an open one."""

from itertools import groupby
from operator import attrgetter

from tidegate.core.schedule.reasons import Reason
from tidegate.core.schedule.snapshot import ModelView, Skip, Snapshot


def pass_gate(snapshot: Snapshot) -> tuple[dict[str, ModelView], list[Skip]]:
    """The open models, and a skip for each closed one. A model that jobs name and no view describes
    is closed with a reason."""
    open_models: dict[str, ModelView] = {}
    skips: list[Skip] = []
    for name, view in snapshot.models.items():
        if view.closed is not None:
            skips.append(Skip(name, "", "", view.closed))
        elif view.room_items <= 0:
            skips.append(Skip(name, "", "", Reason.NO_AVAILABLE_SLOTS))
        else:
            open_models[name] = view
    unknown = {model for model, _ in groupby(snapshot.jobs, attrgetter("model"))} - snapshot.models.keys()
    skips.extend(Skip(name, "", "", Reason.UNKNOWN_CAPACITY) for name in sorted(unknown))
    return open_models, skips
