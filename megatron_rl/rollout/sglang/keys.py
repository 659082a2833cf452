"""The two keys of an engine. They live in a file of mode 600, never on a command line or in a log."""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """`api` opens generation, `admin` what changes the engine. Always both: either one alone leaves a hole."""

    api: str = field(repr=False)
    admin: str = field(repr=False)


def make_keys() -> EngineKeys:
    return EngineKeys(secrets.token_hex(32), secrets.token_hex(32))


def write_key_file(path: Path, keys: EngineKeys) -> None:
    """Write the YAML that SGLang reads with --config and that `read_key_file` reads; mode 600 from the start."""
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f'api-key: "{keys.api}"\nadmin-api-key: "{keys.admin}"\n')
    temporary.rename(path)


def read_key_file(path: Path) -> EngineKeys:
    """Read the lines `api_key: ...` and `admin_api_key: ...` (dashes are fine).

    Raises FileNotFoundError, PermissionError (others may read it) or ValueError (a key is missing), each in one line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: key file not found; it holds api_key and admin_api_key of the engines")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(f"{path}: mode {mode:o} lets others read the keys; run chmod 600 {path}")
    entries = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        entries[name.strip().replace("-", "_")] = value.strip().strip("\"'")
    missing = [name for name in ("api_key", "admin_api_key") if not entries.get(name)]
    if missing:
        raise ValueError(f"{path}: expected lines 'api_key: ...' and 'admin_api_key: ...', missing {', '.join(missing)}")
    return EngineKeys(entries["api_key"], entries["admin_api_key"])
