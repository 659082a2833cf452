"""The rules of docs/architecture.md hold for this repository."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.source_tree import Module, is_within, read_modules

ROOT = Path(__file__).parents[2]

TOO_LONG: dict[str, str] = {}
"""A path, or `path::function`, that may be longer than the rule says -> the reason."""

LIGHT = ("types", "config", "layout", "model_families", "scheduling", "journal", "resharding.plan",
         "resharding.cost", "controller.layouts", "planner")  # fmt: skip
"""What a laptop without torch, and `planner`, must be able to import."""

LIGHT_EXCEPT = ("model_families.transforms",)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(ROOT, rules.PACKAGE)


@pytest.fixture(scope="module")
def all_modules(modules: dict[str, Module]) -> list[Module]:
    folders = ("launch", "checkpoints_tools", "slurm", "tests")
    return [*modules.values(), *(module for folder in folders for module in read_modules(ROOT, folder).values())]


def expect_none(offenders: Iterable[str]) -> None:
    found = list(offenders)
    assert not found, "\n".join(["", *found])


def test_imports_go_down(modules: dict[str, Module]) -> None:
    expect_none(rules.check_floors(modules))


def test_no_cycles(modules: dict[str, Module]) -> None:
    expect_none(rules.check_cycles(modules))


def test_heavy_libraries_stay_in_their_rooms(modules: dict[str, Module]) -> None:
    expect_none(rules.check_heavy(modules))


def loaded_after_importing(names: Iterable[str]) -> set[str]:
    """The heavy libraries that a fresh interpreter holds after importing `names`."""
    code = f"""
        import importlib, sys
        for name in {sorted(names)!r}:
            importlib.import_module(name)
        print(*(library for library in {sorted(rules.HEAVY)!r} if library in sys.modules))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return set(answer.stdout.split())


def test_light_rooms_import_without_heavy_libraries(modules: dict[str, Module]) -> None:
    inner = {name: name.partition(".")[2] for name in modules}
    light = [
        name
        for name, part in inner.items()
        if any(is_within(part, room) for room in LIGHT) and not any(is_within(part, room) for room in LIGHT_EXCEPT)
    ]
    assert light
    assert loaded_after_importing(light) <= {"yaml"}


def test_package_inits_import_nothing_heavy(modules: dict[str, Module]) -> None:
    packages = [name for name, module in modules.items() if module.is_package]
    assert loaded_after_importing(packages) == set()


def test_no_rooms_for_odds_and_ends(all_modules: list[Module]) -> None:
    expect_none(rules.check_names(all_modules))


def test_functions_take_sections(modules: dict[str, Module]) -> None:
    expect_none(rules.check_whole_config(modules))


def test_files_and_functions_are_short(all_modules: list[Module]) -> None:
    expect_none(rules.check_sizes(all_modules, TOO_LONG))


def test_unit_tests_mirror_the_package(modules: dict[str, Module]) -> None:
    expect_none(rules.check_mirror(ROOT, modules))


def test_links_of_the_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert documents
    expect_none(rules.check_links(ROOT, documents))
