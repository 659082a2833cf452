"""The dotted path of a generate function, as text: nothing is imported here."""

from __future__ import annotations

from collections.abc import Sequence


def split_path(path: str) -> tuple[str, str] | None:
    """(module, name) of `package.module:name`; None when it is no such path."""
    module, colon, name = path.partition(":")
    is_path = bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
    return (module, name) if is_path else None


def is_allowed(path: str, packages: Sequence[str]) -> bool:
    """Whether the module lies in one of the packages."""
    module = path.partition(":")[0]
    return any(module == package or module.startswith(f"{package}.") for package in packages)
