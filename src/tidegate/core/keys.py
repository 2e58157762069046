"""The form of an API key, and what is kept of it.

`tg_live_` + 8 characters that name the key + 43 random ones (256 bits) + 6 that check the rest, so
that a scanner for leaked secrets, and we, can tell a key from noise without the store. The store
keeps the name and a keyed hash, never the key. This module draws no randomness and does not know
where the pepper lies.
"""

import hmac
import json
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from tidegate.core.deployments import Secret

PREFIX = "tg_live_"
PUBLIC_LENGTH = 8
SECRET_LENGTH = 43
CHECK_LENGTH = 6
RANDOM_BYTES = 6 + 32
# A key has either some of these or some of a tenant's scopes, never both: an operator is no tenant.
# `admin:content` opens what tenants wrote and what models answered.
ADMIN_SCOPES = ("admin:read", "admin:write", "admin:content")

ENVIRONMENT = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PATTERN = re.compile(
    rf"{PREFIX}(?P<public>[0-9A-Za-z]{{{PUBLIC_LENGTH}}})[0-9A-Za-z]{{{SECRET_LENGTH}}}(?P<check>[0-9A-Za-z]{{{CHECK_LENGTH}}})",
    re.ASCII,
)
_KEY_CHARS = len(PREFIX) + PUBLIC_LENGTH + SECRET_LENGTH + CHECK_LENGTH
PUBLIC_ID = re.compile(rf"[0-9A-Za-z]{{{PUBLIC_LENGTH}}}", re.ASCII)


class NewKey(msgspec.Struct, frozen=True):
    """A new key. Its text is shown only when it is made."""

    public_id: str
    text: Secret


def make(random_bytes: bytes) -> NewKey:
    """Return a key made from 38 random bytes."""
    if len(random_bytes) != RANDOM_BYTES:
        raise ValueError(f"a key needs {RANDOM_BYTES} random bytes, not {len(random_bytes)}")
    public_id = _base62(int.from_bytes(random_bytes[:6], "big"), PUBLIC_LENGTH)
    return _key(public_id, random_bytes[6:])


def remake(public_id: str, random_bytes: bytes) -> NewKey:
    """Return the key under its name with another secret, from as many bytes as a new one."""
    if len(random_bytes) != RANDOM_BYTES or not PUBLIC_ID.fullmatch(public_id):
        raise ValueError(f"a key is made again from its public id and {RANDOM_BYTES} random bytes")
    return _key(public_id, random_bytes[6:])


def _key(public_id: str, random_bytes: bytes) -> NewKey:
    body = f"{PREFIX}{public_id}{_base62(int.from_bytes(random_bytes, 'big'), SECRET_LENGTH)}"
    return NewKey(public_id, Secret(body + _check(body)))


def public_id_of(text: str) -> str | None:
    """Return the part that names the key; None when this text cannot be a key."""
    matched = _PATTERN.fullmatch(text) if len(text) == _KEY_CHARS else None
    if matched is None or _check(text[:-CHECK_LENGTH]) != matched["check"]:
        return None
    return matched["public"]


def keyed_hash(pepper: bytes, text: str) -> bytes:
    """Return what the store keeps of a key.

    A key has 256 random bits, so a fast hash is enough; the pepper makes a stolen table useless.
    """
    return hmac.digest(pepper, text.encode(), "sha256")


class Scopes(msgspec.Struct, frozen=True):
    """Every scope that a key may have: those that the front doors ask of a tenant, and the
    operators'.

    A key that is bound to environments has at most those `in_environments`: the other scopes open
    things that know no environments.
    """

    tenant: tuple[str, ...]
    in_environments: frozenset[str]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.tenant, *ADMIN_SCOPES)

    def text(self, names: Iterable[str]) -> str:
        """Return scopes as the store keeps them; none given means all of a tenant's that exist
        today.

        ValueError names one that does not exist.
        """
        wanted = list(names) or list(self.tenant)
        for name in wanted:
            if name not in self.all:
                raise ValueError(f"there is no scope {name!r}; there are: {', '.join(self.all)}")
        if any(name in self.tenant for name in wanted) and any(name in ADMIN_SCOPES for name in wanted):
            raise ValueError(f"a key with {' or '.join(ADMIN_SCOPES)} may have no other scope: make two keys")
        return " ".join(scope for scope in self.all if scope in wanted)


@lru_cache(maxsize=1024)
def scopes_from(text: str) -> frozenset[str]:
    return frozenset(text.split())


def models_text(names: Iterable[str]) -> str:
    """Return models, resources or environments that a key may use, as the store keeps them; none
    given means any.
    """
    return json.dumps(sorted(set(names)))


@lru_cache(maxsize=1024)
def models_from(text: str) -> frozenset[str]:
    return frozenset(json.loads(text)) if text else frozenset()


def addresses_text(networks: Iterable[str]) -> str:
    """Return addresses and ranges that a key may be used from, as the store keeps them; none given
    means any.
    """
    named = sorted(set(networks))
    return json.dumps(named) if named else ""


def addresses_from(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text else ()


def _check(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), CHECK_LENGTH)


def _base62(number: int, length: int) -> str:
    letters = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        letters.append(_ALPHABET[digit])
    return "".join(reversed(letters))
