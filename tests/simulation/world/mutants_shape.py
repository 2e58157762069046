"""Planted bugs of the shape of a job's work."""

from tests.simulation.world.planting import Mutant, patch
from tidegate.core.job_shape import JobShape, ParameterLevel

SHAPE: dict[str, Mutant] = {
    "defaults_replace": Mutant(
        "shaped",
        "a default replaces what a line says",
        patch(JobShape, "levels", lambda self: (ParameterLevel({}, {**self.defaults, **self.overrides}),)),
    ),
}
