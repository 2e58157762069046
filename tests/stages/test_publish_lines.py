"""What publish keeps of the lines that it writes."""

from __future__ import annotations

import tracemalloc
from array import array

from tidegate.stages.publish_lines import PlacesByItem


def test_the_places_of_many_lines_take_little_memory() -> None:
    count = 100_000
    tracemalloc.start()
    places = PlacesByItem(count)
    for number in range(count):
        places.put(number, number << 20, 1_000_000)
    kept, _ = tracemalloc.get_traced_memory()
    places.in_order(array("I", range(count, 0, -1)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 16 * count
    assert most < 96 * count


def test_items_with_a_line_come_in_the_order_of_the_input() -> None:
    places = PlacesByItem(5)
    assert not places
    for number in (3, 0, 4):
        places.put(number, (1 << 40) + number, 7)
    assert places
    assert places.get(3) == ((1 << 40) + 3, 7)
    assert places.get(1)[1] == 0
    # Lines of the input may be many more than its items: most of them can be blank.
    assert list(places.in_order(array("I", [9, 1, 2, 4_294_967_295, 3]))) == [4, 0, 3]
