"""`tidegate migrate`: bring the store to this program's version."""

import uvloop

from tidegate.cli.terminal import options, terminal
from tidegate.settings import redacted


def migrate(
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Bring the store to this program's version.

    Example: tidegate migrate --config tidegate.yaml
    """
    from tidegate import storage

    settings = options.loaded(config, data).settings
    ran = uvloop.run(storage.migrate(settings))
    if as_json:
        terminal.show_json({"store": redacted(settings.store.location), "ran": ran})
    elif ran:
        terminal.say(f"The store at {redacted(settings.store.location)} is now at schema version {ran[-1]}.")
    else:
        terminal.say(f"The store at {redacted(settings.store.location)} needs no migration.")
