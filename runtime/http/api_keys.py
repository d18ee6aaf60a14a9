"""Who calls: API keys by name, and the allowance of each.

Keys come from `server.api_key` (named key-1, key-2, ... in their order) and from the TOML file
`server.api_key_file`, one table per name:

    [alice]
    key_sha256 = "9f86d08..."     # or: key = "sk-...", in clear
    concurrent = 4                # limits that are left out are those of server.limits
    requests_per_minute = 60
    tokens_per_minute = 100_000
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from ostinato.errors import ConfigError
from ostinato.runtime.config import LimitsConfig, ServerConfig
from ostinato.runtime.http.key_limits import Allowance

log = logging.getLogger(__name__)

ANONYMOUS = "anonymous"  # everybody, where no key is set
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MAX_KEYS = 10_000
_OTHERS_MAY_READ = stat.S_IRGRP | stat.S_IROTH


@dataclass(frozen=True)
class Caller:
    """One named key, or everybody."""

    name: str
    allowance: Allowance


class _FileKey(LimitsConfig):
    key: str = Field("", repr=False)
    key_sha256: str = Field("", pattern="^([0-9a-f]{64})?$")

    @model_validator(mode="after")
    def _one_of_both(self) -> _FileKey:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("needs exactly one of key and key_sha256")
        return self


class KeyRing:
    """All keys of a server. Looking one up takes as long for a wrong key as for a right one.

    What is compared are digests under a secret of this process: how far a wrong digest agrees with a right
    one tells nothing that a sender could know or steer.
    """

    def __init__(self, digests: Mapping[str, bytes], limits: Mapping[str, LimitsConfig]) -> None:
        """`digests`: SHA-256 of each key, by name; empty: no key is needed."""
        self._pepper = secrets.token_bytes(32)
        self.callers = {name: Caller(name, Allowance(limits[name])) for name in digests}
        self._by_digest = {self._peppered(digest): self.callers[name] for name, digest in digests.items()}
        if len(self._by_digest) != len(digests):
            raise ConfigError("server.api_key: the same key is given twice; give each name its own")

    @classmethod
    def of(cls, config: ServerConfig) -> KeyRing:
        """The keys of the settings. ConfigError says what is wrong with them, never showing one."""
        if not all(config.api_key):
            raise ConfigError("server.api_key: a key is empty; leave it out")
        digests = {f"key-{at}": _sha256(key) for at, key in enumerate(config.api_key, 1)}
        limits = dict.fromkeys(digests, config.limits)
        if config.api_key_file:
            for name, entry in _read_file(Path(config.api_key_file)).items():
                if name in digests:
                    raise ConfigError(f"server.api_key_file: the name {name} is that of a server.api_key")
                digests[name] = bytes.fromhex(entry.key_sha256) if entry.key_sha256 else _sha256(entry.key)
                given = {field: getattr(entry, field) for field in entry.model_fields_set}
                own = {field: value for field, value in given.items() if field in LimitsConfig.model_fields}
                limits[name] = config.limits.model_copy(update=own)
        ring = cls(digests, limits)
        if not digests:
            ring.callers[ANONYMOUS] = Caller(ANONYMOUS, Allowance(config.limits))
        return ring

    @property
    def everybody(self) -> Caller | None:
        """Whom a request without any key counts for; None where a key is needed."""
        return self.callers.get(ANONYMOUS) if not self._by_digest else None

    def find(self, key: str) -> Caller | None:
        """Whose key this is."""
        return self._by_digest.get(self._peppered(_sha256(key)))

    def _peppered(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._pepper).digest()


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read_file(path: Path) -> dict[str, _FileKey]:
    what = f"server.api_key_file={path}"
    try:
        raw = path.read_bytes()
        if path.stat().st_mode & _OTHERS_MAY_READ:
            log.warning("%s: others can read this file; `chmod 600` it", what)
        tables = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:  # its text has a place, and at most one character of the file
        raise ConfigError(f"{what}: not valid TOML: {error}") from None
    if not 1 <= len(tables) <= _MAX_KEYS:
        raise ConfigError(f"{what}: has {len(tables)} keys; 1 to {_MAX_KEYS} are allowed")
    found = {}
    for name, table in tables.items():
        if not _NAME.fullmatch(name) or name == ANONYMOUS:
            raise ConfigError(f"{what}: {name!r} is no name: 1 to 64 letters, digits, dots, dashes, _")
        try:
            found[name] = _FileKey.model_validate(table)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            at = ".".join((name, *map(str, first["loc"])))
            raise ConfigError(f"{what}: {at}: {first['msg']}") from None
    return found
