"""One tree of an experiment: its file on top of the files in its `defaults:` list, overrides on top of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.errors import ConfigError, Location
from megatron_rl.config.yaml_tree import Node, parse_yaml

DEFAULTS_KEY = "defaults"


def load_tree(path: Path, overrides: Sequence[str]) -> Node:
    """The merged tree. Later entries of `defaults:` win over earlier ones, the file over its defaults, overrides over
    all; mappings merge, lists and scalars replace. Raises `ConfigError`."""
    tree = _load_file(path, (), Location(_shown(path)))
    for override in overrides:
        tree = _apply_override(tree, override)
    return tree


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _load_file(path: Path, including: tuple[Path, ...], asked_at: Location) -> Node:
    real = path.resolve()
    if real in including:
        cycle = " -> ".join(_shown(entry) for entry in (*including[including.index(real) :], real))
        raise ConfigError(asked_at, DEFAULTS_KEY, f"cycle of defaults: {cycle}; remove one of them")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(asked_at, "", f"cannot read {_shown(path)}: {reason}; expected a YAML file") from error
    own = parse_yaml(text, _shown(path))
    if own.value is None:
        own = Node({}, own.location)
    if not isinstance(own.value, dict):
        raise ConfigError(own.location, "", "expected sections (run:, model:, ...) at the top of the file")
    body = dict(own.value)
    merged = Node({}, own.location)
    for name, location in _default_names(body.pop(DEFAULTS_KEY, None)):
        merged = merge(merged, _load_file(_find_overlay(name, path, location), (*including, real), location))
    return merge(merged, Node(body, own.location))


def _default_names(node: Node | None) -> list[tuple[str, Location]]:
    if node is None or node.value is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    for item in items:
        if not isinstance(item.value, str):
            raise ConfigError(item.location, DEFAULTS_KEY, f"expected a list of YAML files, got {item.plain()!r}")
    return [(str(item.value), item.location) for item in items]


def _find_overlay(name: str, including: Path, location: Location) -> Path:
    """`name` beside the file that names it, else in a folder above that is called configs, else in ./configs."""
    here = including.resolve().parent
    roots = [here, *(parent for parent in (here, *here.parents) if parent.name == "configs"), Path.cwd() / "configs"]
    file_name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    for root in roots:
        if (root / file_name).is_file():
            return root / file_name
    looked = ", ".join(dict.fromkeys(_shown(root) for root in roots))
    raise ConfigError(location, DEFAULTS_KEY, f"no file {file_name} (looked in {looked})")


def merge(below: Node, above: Node) -> Node:
    """`above` over `below`; keys that only one side has keep their place."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    merged = dict(below.value)
    for key, child in above.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, above.location)


def _apply_override(tree: Node, override: str) -> Node:
    location = Location(f"override {override!r}")
    key_path, equals, text = override.partition("=")
    keys = key_path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(location, "", "expected key.path=value, for example run.num_steps=20")
    return _set(tree, keys, Node(parse_yaml(text, location.source, line=None).value, location), key_path)


def _set(tree: Node, keys: Sequence[str], leaf: Node, key_path: str) -> Node:
    if not keys:
        return merge(tree, leaf)
    key, rest = keys[0], keys[1:]
    if isinstance(tree.value, list):
        if not key.isdigit() or int(key) >= len(tree.value):
            reason = f"expected a number from 0 to {len(tree.value) - 1} in place of {key!r}"
            raise ConfigError(leaf.location, key_path, reason)
        items = list(tree.value)
        items[int(key)] = _set(items[int(key)], rest, leaf, key_path)
        return Node(items, tree.location)
    children = dict(tree.value) if isinstance(tree.value, dict) else {}
    children[key] = _set(children.get(key, Node({}, leaf.location)), rest, leaf, key_path)
    return Node(children, tree.location if isinstance(tree.value, dict) else leaf.location)
