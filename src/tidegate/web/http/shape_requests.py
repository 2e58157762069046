"""What callers may ask of all lines and files of a batch at once, checked: parameters of its requests."""

from typing import Any

from tidegate.core.errors import ApiProblem
from tidegate.core.input.line_faults import LineFault
from tidegate.core.input.parameters import check_parameters

SHAPE_ALLOWED = {
    "defaults": "an object with parameters of a request's body",
    "overrides": "an object with parameters of a request's body",
}


def checked_parameters(name: str, values: dict[str, Any] | None, endpoint: str) -> dict[str, Any]:
    """Parameters for every request of a batch."""
    if not values:
        return {}
    try:
        check_parameters(values, endpoint)
    except LineFault as fault:
        param = f"{name}.{fault.param}" if fault.param else name
        raise ApiProblem(400, "invalid_parameter", f"`{name}` {fault.message}", param=param) from None
    return values
