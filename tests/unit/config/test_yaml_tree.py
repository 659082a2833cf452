"""YAML 1.2 scalars, and text that reads back as what was written."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.yaml_tree import dump_plain, parse_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(VALUES)
@example({"<<": "=", "off": "on", "1e5": "1e5", "0o7": "010", "~": "null", "1:30": "2024-01-01", "é\x85": "- #:"})
@example([1e-7, 1e22, -0.0, math.inf, -math.inf, 10**30, "1_000", "+.inf", ".5", "5.", "true", ""])
def test_what_is_dumped_reads_back_equal(value: object) -> None:
    read = parse_yaml(dump_plain(value), "x").plain()
    assert read == value
    assert repr(read) == repr(value), "the types are the same too, also within lists and mappings"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2.5E+3", -2500.0),
        ("1_000", 1000),
        ("0", 0),
        ("off", "off"),
        ("Yes", "Yes"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        (".", "."),
        ("-", [None]),
        ("", None),
        ("# nothing", None),
        ("'1'", "1"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = parse_yaml(text, "x").plain()
    assert read == value
    assert type(read) is type(value)


def test_every_value_knows_the_line_of_its_key() -> None:
    root = parse_yaml("a:\n  b:\n    - 1\n\n    - c: |\n        text\n", "f.yaml")
    found = {}

    def walk(node, path):
        found[path] = node.location.line
        is_list, is_mapping = isinstance(node.value, list), isinstance(node.value, dict)
        for key, child in enumerate(node.value) if is_list else node.value.items() if is_mapping else ():
            walk(child, f"{path}.{key}")

    walk(root, "")
    assert found == {"": 1, ".a": 1, ".a.b": 2, ".a.b.0": 3, ".a.b.1": 5, ".a.b.1.c": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", "f.yaml:4: b.c: duplicate key, first given at f.yaml:3; keep one"),
        ("a: 1\nb: [1, 2", "f.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2", "f.yaml:2: not valid YAML: but found another document"),
        ("a: !!python/object:os.system x", "f.yaml:1: not valid YAML"),
        ("a: b\nc: \x01", "f.yaml:2: not valid YAML: character #x0001 is not allowed"),
        ("[1]: 2", "f.yaml:1: expected a word as key"),
    ],
)
def test_faults(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
