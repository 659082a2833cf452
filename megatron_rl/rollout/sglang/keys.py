"""The two keys of an engine. They live in a file of mode 600, never on a command line or in a log."""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import yaml


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
        yaml.safe_dump({"api-key": keys.api, "admin-api-key": keys.admin}, file)
    temporary.rename(path)


def read_key_file(path: Path) -> EngineKeys:
    """Read `api-key` and `admin-api-key` (underscores are fine).

    Raises FileNotFoundError, PermissionError (others may read it) or ValueError (a key is missing), each in one line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: key file not found; it holds api_key and admin_api_key of the engines")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(f"{path}: mode {mode:o} lets others read the keys; run chmod 600 {path}")
    content = yaml.safe_load(path.read_text())
    entries = {str(k).replace("-", "_"): v for k, v in content.items()} if isinstance(content, dict) else {}
    missing = [name for name in ("api_key", "admin_api_key") if not isinstance(entries.get(name), str)]
    if missing:
        raise ValueError(f"{path}: expected text under api_key and admin_api_key, missing {', '.join(missing)}")
    return EngineKeys(entries["api_key"], entries["admin_api_key"])
