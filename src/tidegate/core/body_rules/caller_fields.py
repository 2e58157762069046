"""Refuse what a caller may not put into a request's body, unless the model's settings allow it.

- objects that a provider keeps: their ids are not ours, and behind one provider key they belong to
  all tenants at once;
- parameters that steer a server itself, such as the place in its queue, templates that it runs, or
  where it takes its cache from;
- files that a server would fetch from elsewhere;
- names that differ from a parameter's own only in case or dashes: a lenient server could read them
  instead.

`read_plain` passes most bodies. `field_fault` reads the others as pairs, so that both values of a
repeated name are seen. It looks into everything except JSON schemas, arguments of tools, metadata
and the documents of a chat, where the caller chooses the names. This module knows no door and no
settings.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tidegate.core.body_rules import media_hosts
from tidegate.core.body_rules.body_names import (
    CONTENTS,
    ENGINE_FIELDS,
    ENGINE_SPELLED,
    FREE,
    GIVES_WHOLE,
    IN_PARTS,
    MEDIA,
    MEDIA_KINDS,
    NOT_MEDIA,
    PROVIDER_FIELDS,
    PROVIDER_SPELLED,
    QUERIES,
    READ_SPELLED,
    TEMPLATE_SPELLED,
    folded,
)
from tidegate.core.body_rules.plain_body import HARMLESS
from tidegate.core.deployments import EngineKind
from tidegate.core.json_limits import TOO_MANY, has_too_many_values

PATH_CHARS_MAX = 200
# A body with more names than any request needs is refused, so that it cannot keep a process busy.
NAMES_MAX = 200_000
# The key of the rules for every name without rules of its own.
OTHER = ""


class FieldRules(msgspec.Struct, frozen=True):
    """The rules of calls to one name.

    `refused` are parameters that steer its servers; `allowed` are names that the operator allows.
    `media_hosts` are the hosts, in lower case, that its servers may fetch files from.
    """

    refused: frozenset[str] = ENGINE_FIELDS[EngineKind.GENERIC]
    allowed: frozenset[str] = frozenset()
    media_hosts: frozenset[str] = frozenset()

    def both(self, other: "FieldRules") -> "FieldRules":
        """Return the rules of a call that either of the two may apply to: only what both allow is
        allowed.
        """
        hosts = self.media_hosts & other.media_hosts
        for one, two in ((self, other), (other, self)):
            if media_hosts.ANY_HOST in one.media_hosts:
                hosts |= two.media_hosts
        return FieldRules(self.refused | other.refused, self.allowed & other.allowed, hosts)

    def refuses(self, name: str) -> bool:
        return name not in self.allowed and (name in self.refused or name in PROVIDER_FIELDS)


STRICT = FieldRules()


class FieldFault(NamedTuple):
    """The reason why a request may not be sent, in words for its author; `param` is its place in
    the body.
    """

    code: str
    message: str
    param: str


class _FieldPairs(list[tuple[str, Any]]):
    """A JSON object as a list of pairs."""


def rules_for(rules_of: Mapping[str, FieldRules], name: str) -> FieldRules:
    """Return the rules of calls to this name."""
    return rules_of.get(name) or rules_of.get(OTHER, STRICT)


def field_fault(body: bytes, rules: FieldRules) -> FieldFault | None:
    """Return the first fault of a body that is not plain; None when it may be sent."""
    if has_too_many_values(body):
        return FieldFault("invalid_request", TOO_MANY, "")
    try:
        fields = json.loads(body, object_pairs_hook=_FieldPairs, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return FieldFault("invalid_request", "The body cannot be read as JSON: write it with a JSON library.", "")
    if not isinstance(fields, _FieldPairs):
        return None
    try:
        return _FieldSearch(rules).top(fields)
    except _TooMany:
        return FieldFault("invalid_request", f"The body has more than {NAMES_MAX:,} names: split the request.", "")


class _TooMany(Exception):
    """The body has more names than may be looked at."""


class _FieldSearch:
    def __init__(self, rules: FieldRules) -> None:
        self._rules = rules
        self._count = 0

    def top(self, members: _FieldPairs, path: str = "") -> FieldFault | None:
        """Look at the parameters of a request."""
        if len(members) > NAMES_MAX:
            raise _TooMany
        for key, value in members:
            name = folded(key)
            if name in READ_SPELLED and key != READ_SPELLED[name]:
                return _misspelled(_at(path, key), READ_SPELLED[name])
            # Null is refused too: with it, the server would not get the operator's own value.
            steering = ENGINE_SPELLED.get(name, key)
            if steering in self._rules.refused and steering not in self._rules.allowed:
                return _steers(_at(path, key), steering)
            if name == "chattemplatekwargs" and (fault := self._template(value, _at(path, key))):
                return fault
            if name == "extrabody" and isinstance(value, _FieldPairs) and (fault := self.top(value, _at(path, key))):
                return fault
        return self._object(members, path, "", is_top=True)

    def _template(self, value: Any, path: str) -> FieldFault | None:
        """Look for arguments that would replace the template, or what it is applied to."""
        if not isinstance(value, _FieldPairs) or not self._rules.refuses("chat_template"):
            return None
        found = next((key for key, one in value if folded(key) in TEMPLATE_SPELLED and one is not None), None)
        return None if found is None else _steers(_at(path, found), "chat_template")

    def _any(self, value: Any, path: str, name: str) -> FieldFault | None:
        if isinstance(value, _FieldPairs):
            return self._object(value, path, name)
        if isinstance(value, list):
            for at, one in enumerate(value):
                if isinstance(one, list) and (fault := self._any(one, f"{path}[{at}]", name)):
                    return fault
        return None

    def _object(self, members: _FieldPairs, path: str, within: str, *, is_top: bool = False) -> FieldFault | None:
        """Look at one object under the folded name `within`, and at everything in it."""
        self._count += 1 + len(members)
        if self._count > NAMES_MAX:
            raise _TooMany
        named = [(folded(key), value) for key, value in members]
        if not is_top and (found := _referred_to(named, within)) and self._rules.refuses(found):
            return _kept_elsewhere(_at(path, "id"), found)
        kinds = {value for name, value in named if name == "type" and isinstance(value, str)}
        holds_media = bool(kinds & MEDIA_KINDS) or within in MEDIA or within.endswith("url")
        has_records = not is_top or _is_chat(named)
        for (key, value), (name, _) in zip(members, named, strict=True):
            if value is None or name in FREE or name in NOT_MEDIA or (is_top and key in HARMLESS):
                continue
            if name == "documents" and has_records:
                continue
            if name == "input" and not is_top and isinstance(value, _FieldPairs):
                # The arguments of a tool's call.
                continue
            if name == "data" and kinds == {"text"} and within == "source":
                # A document given as text.
                continue
            here = _at(path, key)
            if fault := self._member(name, value, here):
                return fault
            if fault := self._media(name, value, here, holds_media=holds_media):
                return fault
            if fault := self._any(value, here, name):
                return fault
        return None

    def _member(self, name: str, value: Any, path: str) -> FieldFault | None:
        known = PROVIDER_SPELLED.get(name)
        if known is not None and value not in ("", []) and self._rules.refuses(known):
            # A container may also be described; then it is made for this call.
            is_described = known == "container" and isinstance(value, _FieldPairs) and not _names_container(value)
            if not is_described:
                return _kept_elsewhere(path, known)
        steering = ENGINE_SPELLED.get(name)
        if steering in IN_PARTS and self._rules.refuses(steering):
            return _steers(path, steering)
        return None

    def _media(self, name: str, value: Any, path: str, *, holds_media: bool) -> FieldFault | None:
        """Look for URLs: under names of URLs, and in place of a file's content."""
        is_url = name.endswith(("url", "uri")) and (holds_media or name not in ("url", "uri"))
        if not is_url and name not in CONTENTS:
            return None
        for one in value if isinstance(value, list) and not isinstance(value, _FieldPairs) else (value,):
            if not isinstance(one, str) or not one or media_hosts.is_local(one):
                continue
            if not is_url and not media_hosts.names_a_place(one):
                continue
            if not media_hosts.is_allowed(one, self._rules.media_hosts):
                return _fetched_from(one, path)
        return None


def _is_chat(named: list[tuple[str, Any]]) -> bool:
    """Return whether these parameters are those of a chat, and of nothing that compares texts."""
    names = {name for name, _ in named}
    return "messages" in names and names.isdisjoint(QUERIES)


def _referred_to(named: list[tuple[str, Any]], within: str) -> str:
    """Return the name of what an object only refers to by its id; empty when the object is given
    whole.
    """
    given = {name for name, value in named if value not in (None, "", [])}
    if "id" not in given:
        return ""
    if within in ("audio", "prompt", "voice"):
        return within
    kinds = [value for name, value in named if name == "type"]
    if "item_reference" in kinds or (within == "input" and given.isdisjoint(("type", "role", "content"))):
        return "item_reference"
    for kind, contents in GIVES_WHOLE.items():
        if kind in kinds and given.isdisjoint(contents):
            return "item_reference"
    return ""


def _names_container(value: _FieldPairs) -> bool:
    return any(folded(key) in ("id", "skills") and one not in (None, "", []) for key, one in value)


def _at(path: str, key: str) -> str:
    plain = key if key.isidentifier() and key.isascii() else ascii(key[:40])
    return (f"{path}.{plain}" if path else plain)[:PATH_CHARS_MAX]


def _kept_elsewhere(path: str, name: str) -> FieldFault:
    message = (
        f"`{path}` names an object that the provider keeps, and this model does not take such ids. Send the content itself, or ask the "
        f"operator to list `{name}` in allowed_fields of the model or of `upstream`."
    )
    return FieldFault("parameter_not_allowed", message, path)


def _steers(path: str, name: str) -> FieldFault:
    message = (
        f"`{path}` steers the model server itself, and callers of this model may not set it. Leave it out, or ask the operator to list "
        f"`{name}` in allowed_fields of the model or of `upstream`."
    )
    return FieldFault("parameter_not_allowed", message, path)


def _misspelled(path: str, name: str) -> FieldFault:
    message = (
        f"`{path}` is another spelling of `{name}`, and servers differ in which one they read. Name `{name}` alone."
    )
    return FieldFault("duplicate_parameter", message, path)


def _fetched_from(url: str, path: str) -> FieldFault:
    host = media_hosts.host_of(url)
    if host:
        why = f"and this model's servers may not fetch from {host}. Send the file as a data: URL, or ask the operator to list the host"
    else:
        why = "by something that is no plain http(s) URL. Send the file as a data: URL, or name a host that the operator lists"
    return FieldFault(
        "media_not_allowed",
        f"`{path}` names a file elsewhere, {why} in media_hosts of the model or of `upstream`.",
        path,
    )
