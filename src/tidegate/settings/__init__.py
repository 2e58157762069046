"""Every setting of the program, and the only reader of the environment.

`load` puts the layers together; `groups` declares each setting once; `catalog` lists them for people.
"""

from tidegate.settings.groups import Settings
from tidegate.settings.layers import Loaded, load
from tidegate.settings.models import deployments
from tidegate.settings.rules import local_path, redacted

__all__ = ["Loaded", "Settings", "deployments", "load", "local_path", "redacted"]
