"""An input that was scanned in parts, put together as if it had been scanned in one.

Each part begins behind a newline and knows nothing of the others. What one scan would have found differently because of what
stands in another part (limits that hold for the whole, bounds on what is remembered) is not mended here: then the parts
are of no use, and whoever asked scans the input in one.
"""

from dataclasses import replace

from tidegate.core.input.prefix_tree import REFERENCE_BYTES_MAX
from tidegate.core.input.scan import FAMILIES_MAX, MODELS_MAX, REFERENCES_BYTES_MAX, Scan

ITEM_COLUMNS = ("at", "size", "id_hash", "output_tokens", "fixed_size", "prompt_at", "prompt_size", "keys")


def join(whole: Scan, part: Scan) -> bool:
    """Add to a scan what the next part of the input was found to hold; False when only one scan of both can tell."""
    if not _joinable(whole, part):
        return False
    for model in part.models:
        whole.add_model(model)
    families = _join_families(whole, part)
    first_stem = len(whole.stem_cut)
    whole.stem_family.extend(map(families.__getitem__, part.stem_family))
    whole.stem_reference += part.stem_reference
    whole.stem_cut += part.stem_cut
    whole.stem.fromlist([first_stem + stem for stem in part.stem])
    for name in ITEM_COLUMNS:
        getattr(whole, name).extend(getattr(part, name))
    lines = whole.line_count
    whole.line.fromlist([lines + line for line in part.line])
    whole.bad_id_hash += part.bad_id_hash
    whole.bad_at += part.bad_at
    whole.bad_size += part.bad_size
    whole.bad_line.fromlist([lines + line for line in part.bad_line])
    whole.errors += [replace(error, line=lines + (error.line or 0)) for error in part.errors]
    whole.line_count += part.line_count
    whole.input_count += part.input_count
    return True


def _joinable(whole: Scan, part: Scan) -> bool:
    rules = whole.rules
    models = {*whole.models, *part.models}
    error_count = len(whole.errors) + len(part.errors)
    return (
        not part.stopped
        and error_count < rules.errors_max
        and whole.item_count + part.item_count + error_count <= rules.item_count_max
        and len(models) <= (1 if rules.single_model else MODELS_MAX)
        and len(whole.families) + len(part.families) <= FAMILIES_MAX
        and whole.references_size + part.references_size <= REFERENCES_BYTES_MAX - REFERENCE_BYTES_MAX
    )


def _join_families(whole: Scan, part: Scan) -> list[int]:
    """The numbers in the whole of the part's families."""
    numbers = []
    for family, name, fixed_size in zip(part.families, part.family_names, part.family_fixed_size, strict=True):
        number = whole.family_number(name)
        if number is None:
            number = whole.add_family(family, name, fixed_size)
        else:
            whole.families[number].join(family)
        numbers.append(number)
    return numbers
