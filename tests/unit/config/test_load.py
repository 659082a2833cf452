"""Errors are one line with place, key path, expectation and nearest key; overlays, overrides and reload hold."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.load import load_experiment
from megatron_rl.config.resolve import dump_yaml, resolve

BODY = """\
model:
  family: llama
  path: some/folder
data:
  sources:
    - {name: sums, kind: reasoning_gym, task: chain_sum, weight: 2}
run:
  num_steps: 7
  deadline_s: 1e3
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "exp.yaml", BODY)


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_values_have_the_types_of_their_fields(experiment: Path) -> None:
    config = load_experiment(experiment, ["trainer.optimizer.learning_rate=3", "telemetry.progress=off"]).config
    assert config.run.deadline_s == 1000.0
    assert isinstance(config.run.deadline_s, float)
    assert config.trainer.optimizer.learning_rate == 3.0
    assert isinstance(config.trainer.optimizer.learning_rate, float)
    assert config.telemetry.progress == "off"
    assert isinstance(config.data.sources, tuple)
    assert config.data.sources[0].weight == 2.0
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run: {num_stepz: 3}", "exp.yaml:1: run.num_stepz: unknown key; did you mean run.num_steps?"),
        ("runn: {}", "exp.yaml:1: runn: unknown key; did you mean run?"),
        ("\ntrainer:\n  tp: 2", "exp.yaml:3: trainer.tp: unknown key; did you mean trainer.layout.tp?"),
        ("run: {num_steps: ten}", "exp.yaml:1: run.num_steps: expected an integer, got 'ten'"),
        ("run: {num_steps: 1.5}", "exp.yaml:1: run.num_steps: expected an integer, got 1.5"),
        ("run: {num_steps: true}", "exp.yaml:1: run.num_steps: expected an integer, got True"),
        ("run: {deadline_s: true}", "exp.yaml:1: run.deadline_s: expected a number, got True"),
        ("run: {deadline_s: .nan}", "exp.yaml:1: run.deadline_s: expected a finite number, got nan"),
        ("run: {overwrite: 1}", "exp.yaml:1: run.overwrite: expected true or false, got 1"),
        ("run: {name: 5}", "exp.yaml:1: run.name: expected text, got 5"),
        ("run: 5", "exp.yaml:1: run: expected a section with keys, got 5"),
        ("run:", "exp.yaml:1: run: expected a section with keys, got None"),
        ("model: {dims: [1]}", "exp.yaml:1: model.dims: expected a mapping, got a list"),
        ("data: {sources: {a: 1}}", "exp.yaml:1: data.sources: expected a list of a section with keys, got a mapping"),
        ("data:\n  sources:\n  - name: x", "exp.yaml:3: data.sources.0: missing key 'kind', expected one of"),
        ("data:\n  sources:\n  - nam: x", "exp.yaml:3: data.sources.0.nam: unknown key; did you mean"),
        ("rollout: {engine: sglan}", "expected one of embedded, sglang, got 'sglan'; did you mean sglang?"),
        ("trainer:\n  layout:\n    dp: x", "exp.yaml:3: trainer.layout.dp: expected an integer or null, got 'x'"),
        ("run:\n  seed: 1\n  seed: 2", "exp.yaml:3: run.seed: duplicate key, first given at exp.yaml:2; keep one"),
        ("run: [1", "exp.yaml:1: not valid YAML"),
        ("run: {1: 2}", "exp.yaml:1: run: expected a word as key, got '1'; quote it"),
        ("run: &a\n  x: *a", "an alias that contains itself"),
        ("- 1", "exp.yaml:1: expected sections (run:, model:, ...) at the top of the file"),
        ("model: {dims: {a: !!python/none 1}}", "not valid YAML"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in error_of(write(tmp_path / "exp.yaml", line))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.layut.tp=2", "trainer.layut: unknown key; did you mean trainer.layout?"),
        ("run.num_steps=many", "run.num_steps: expected an integer, got 'many'"),
        ("run.num_steps", "expected key.path=value, for example run.num_steps=20"),
        ("run..seed=1", "expected key.path=value"),
        ("run.name=[a", "not valid YAML"),
        ("data.sources.1.task=x", "data.sources.1.task: expected a number from 0 to 0 in place of '1'"),
        ("data.sources.0.taks=x", "data.sources.0.taks: unknown key; did you mean data.sources.0.task?"),
        ("run.name.first=x", "run.name: expected text, got a mapping"),
    ],
)
def test_bad_overrides_name_themselves(experiment: Path, override: str, expected: str) -> None:
    message = error_of(experiment, "run.seed=3", override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


def test_overrides_reach_lists_mappings_and_null(experiment: Path) -> None:
    overrides = [
        "data.sources.0.task=gcd",
        "data.sources.0.params={a: [1, 2]}",
        "trainer.layout.dp=null",
        "run.name=a=b",
    ]
    config = load_experiment(experiment, overrides).config
    assert (config.data.sources[0].task, config.data.sources[0].name) == ("gcd", "sums")
    assert config.data.sources[0].params == {"a": [1, 2]}
    assert config.trainer.layout.dp is None
    assert config.run.name == "a=b"


def test_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        error_of(Path("none.yaml"))
        == "none.yaml: cannot read none.yaml: No such file or directory; expected a YAML file"
    )
    assert "Is a directory" in error_of(tmp_path)


def test_later_overlays_win_and_lists_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configs/base/default.yaml", "run: {seed: 1, num_steps: 1, name: b}\nmodel: {dims: {a: 1, b: 1}}")
    write(tmp_path / "configs/models/m.yaml", "model: {dims: {b: 2}, family: llama}\nrun: {num_steps: 2}")
    write(tmp_path / "configs/experiments/beside.yaml", "data: {sources: [{name: old, kind: jsonl, path: p}]}")
    path = write(
        tmp_path / "configs/experiments/e.yaml",
        """\
        defaults: [base/default, models/m.yaml, beside]
        run: {name: top}
        data:
          tokenizer: {kind: characters}
          sources:
            - {name: new, kind: jsonl, path: q}
        """,
    )
    loaded = load_experiment(path)
    config = loaded.config
    assert (config.run.seed, config.run.num_steps, config.run.name) == (1, 2, "top")
    assert config.model.dims == {"a": 1, "b": 2}
    assert [source.name for source in config.data.sources] == ["new"]
    locate = loaded.provenance.locate
    assert str(locate("run.seed")) == "configs/base/default.yaml:1"
    assert str(locate("model.dims.b")) == "configs/models/m.yaml:1"
    assert str(locate("data.sources.0.path")) == "configs/experiments/e.yaml:6"
    assert str(locate("run.deadline_s")) == "configs/experiments/e.yaml:2", (
        "a default lies in its nearest given section"
    )
    assert str(loaded.provenance.error("run.seed", "too\nbig")) == "configs/base/default.yaml:1: run.seed: too big"


def test_a_null_empties_a_mapping(experiment: Path) -> None:
    above = write(experiment.parent / "above.yaml", "defaults: exp\nmodel: {path: x, dims: null}\nrun: {name: y}")
    write(experiment, BODY.replace("path: some/folder", "dims: {hidden_size: 3}"))
    config = load_experiment(above).config
    assert config.model.dims == {}
    assert config.model.family == "llama"


def test_faults_of_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.yaml", "run: {}\ndefaults: [b]")
    write(tmp_path / "b.yaml", "defaults:\n  - c")
    write(tmp_path / "c.yaml", "defaults: [a.yaml]")
    expected = "c.yaml:1: defaults: cycle of defaults: a.yaml -> b.yaml -> c.yaml -> a.yaml; remove one of them"
    assert error_of(Path("a.yaml")) == expected
    write(tmp_path / "b.yaml", "defaults:\n  - gone")
    assert error_of(Path("a.yaml")).startswith("b.yaml:2: defaults: no file gone.yaml (looked in ")
    write(tmp_path / "b.yaml", "defaults:\n  - 3")
    assert error_of(Path("a.yaml")) == "b.yaml:2: defaults: expected a list of YAML files, got 3"


def test_one_overlay_may_be_reached_twice(experiment: Path) -> None:
    for name in ("left", "right"):
        write(experiment.parent / f"{name}.yaml", "defaults: exp")
    assert load_experiment(write(experiment.parent / "top.yaml", "defaults: [left, right]")).config.run.num_steps == 7


def test_a_dumped_experiment_reloads_equal(experiment: Path) -> None:
    overrides = [
        "run.name='1e-4'",
        "model.family='off'",
        "data.sources.0.params={a: 1e-9, b: '2', c: ['yes', yes, null, 0x1F, '010', {d: 1:30}], e: 1.0}",
        "trainer.optimizer.learning_rate=1.7e-7",
        'data.tokenizer.system_prompt="0123 \\n\\té: #-\'"',
        "trainer.megatron.transformer={moe_z_loss_coeff: 1e-3, recompute_modules: [mlp]}",
    ]
    config = load_experiment(experiment, overrides).config
    assert config.data.tokenizer.system_prompt is not None
    for version in (config, resolve(config)):
        assert load_experiment(write(experiment.parent / "again.yaml", dump_yaml(version))).config == version


def test_import_is_light() -> None:
    code = """
        import sys, time
        start = time.process_time()  # not the clock: a busy machine must not fail what is a property of the code
        import megatron_rl.config.load, megatron_rl.config.resolve
        seconds = time.process_time() - start
        heavy = {"torch", "numpy", "ray", "sglang", "megatron", "transformers", "tensorboard"} & set(sys.modules)
        assert not heavy, heavy
        print(seconds)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, timeout=60) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 0.3, os.linesep.join(run.stdout for run in runs)
