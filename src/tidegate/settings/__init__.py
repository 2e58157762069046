"""All settings, each declared once, and the only reader of the environment.

`load` merges the layers; `groups` declares each setting once; `catalog` lists them for people.
"""

from tidegate.settings.groups import Settings
from tidegate.settings.layers import Loaded, load, openai_names
from tidegate.settings.models import deployments, resources, slot_caps
from tidegate.settings.policy import call_rules, schedule_policy, switched
from tidegate.settings.rules import local_path, redacted
from tidegate.settings.tenants import TenantPolicy, Tenants

__all__ = [
    "Loaded",
    "Settings",
    "TenantPolicy",
    "Tenants",
    "call_rules",
    "deployments",
    "load",
    "local_path",
    "openai_names",
    "redacted",
    "resources",
    "schedule_policy",
    "slot_caps",
    "switched",
]
