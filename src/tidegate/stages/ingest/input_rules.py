"""The rules of an input, from the settings.

Ingest uses them, and the check of an input without a job.
"""

from tidegate.core.input.lines import LineRules
from tidegate.settings import Settings


def line_rules(settings: Settings, endpoint: str, invalid_lines: str, *, prefix_order: bool) -> LineRules:
    """Return the rules for an input of a job for this endpoint."""
    return LineRules(
        endpoint=endpoint,
        single_model=settings.ingest.single_model,
        invalid_lines=invalid_lines,
        prefix_order=prefix_order,
        line_bytes_max=settings.limits.line_bytes_max,
        item_count_max=settings.limits.items_max,
        depth_max=settings.limits.json_depth_max,
        slice_count_max=settings.ingest.slice_count_max,
        slice_bytes_max=settings.ingest.slice_bytes_max,
        slice_units_max=settings.ingest.slice_units_max,
        levels=settings.parameters.levels(),
    )
