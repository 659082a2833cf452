import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.rollout.sglang.launch_args import CUSTOM_LOADER, EnginePlace, ServedModel, ServerLaunch, plan_launch
from megatron_rl.types.routing import RoutingShape

CPU = EnginePlace(port=4321, cpu_cores=(4, 5, 6, 7, 9))
GPU = EnginePlace(host="10.0.0.3", port=4321, device="cuda")


def plan(section: SglangSection, place: EnginePlace = CPU, **options) -> ServerLaunch:
    model = replace(ServedModel("/opt/engine/python", "/models/m", "bf16", max_context=300), **options)
    return plan_launch(section, place, model, key_file=Path("/w/keys.yaml"), receiver_dir=Path("/w/receivers"))


def options_of(launch: ServerLaunch) -> dict[str, list[str]]:
    """Flag -> its values, in the way argparse reads them."""
    options: dict[str, list[str]] = {}
    for word in launch.argv[3:]:
        if word.startswith("--"):
            options[word] = []
        else:
            options[next(reversed(options))].append(word)
    return options


def test_command_and_caps():
    launch = plan(SglangSection(tp_size=2, num_concurrent=7))
    options = options_of(launch)
    assert launch.argv[:3] == ("/opt/engine/python", "-m", "sglang.launch_server")
    assert options["--config"] == ["/w/keys.yaml"]
    assert options["--max-total-tokens"] == [str(7 * 300)] and options["--max-running-requests"] == ["7"]
    assert options["--host"] == ["127.0.0.1"] and options["--port"] == ["4321"]
    assert options["--sleep-on-idle"] == [] and options["--enable-deterministic-inference"] == []
    assert options["--custom-weight-loader"] == [CUSTOM_LOADER]
    assert options["--dtype"] == ["bfloat16"] and options["--weight-version"] == ["0"]
    assert "--nnodes" not in options and "--enable-return-routed-experts" not in options
    routing = RoutingShape(num_layers=3, top_k=2, num_experts=9)
    assert options_of(plan(SglangSection(), routing=routing))["--enable-return-routed-experts"] == []


def test_expert_parallelism_is_passed_on():
    assert options_of(plan(SglangSection(tp_size=4, ep_size=2)))["--ep-size"] == ["2"]
    assert "--ep-size" not in options_of(plan(SglangSection(tp_size=4)))


def test_the_custom_loader_exists_under_its_name():
    module, _, function = CUSTOM_LOADER.rpartition(".")
    source = Path(*module.split(".")).with_suffix(".py")
    assert f"def {function}(model" in (Path(__file__).parents[4] / source).read_text()


def test_server_args_override_defaults_and_take_every_kind_of_value():
    args = {
        "max_total_tokens": 999,
        "enable-deterministic-inference": False,
        "enable_return_routed_experts": True,
        "cuda_graph_bs": [1, 2, 5],
        "json_model_override_args": {"a": 1},
        "mem_fraction_static": 0.6,
        "log_level": None,
    }
    options = options_of(plan(SglangSection(server_args=args)))
    assert options["--max-total-tokens"] == ["999"]
    assert "--enable-deterministic-inference" not in options and "--log-level" not in options
    assert options["--enable-return-routed-experts"] == []
    assert options["--cuda-graph-bs"] == ["1", "2", "5"]
    assert json.loads(options["--json-model-override-args"][0]) == {"a": 1}
    assert options["--mem-fraction-static"] == ["0.6"]


@pytest.mark.parametrize("name", ["api_key", "admin-api-key", "host", "tp-size", "skip_tokenizer_init"])
def test_derived_options_are_refused(name):
    with pytest.raises(ValueError, match=r"rollout\.sglang\.server_args\..*derived"):
        plan(SglangSection(server_args={name: "x"}))


def test_a_value_without_a_command_line_form_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.sglang\.server_args\.stream_interval: set"):
        plan(SglangSection(server_args={"stream_interval": {3}}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_interfaces_are_refused(host):
    with pytest.raises(ValueError, match="one interface"):
        plan(SglangSection(), EnginePlace(host=host, port=1, cpu_cores=(0,)))


def test_an_engine_over_nodes_has_one_command_per_node():
    section = SglangSection(tp_size=16, num_nodes=2)
    ranks = []
    for rank, host in enumerate(("10.0.0.3", "10.0.0.4")):
        place = EnginePlace(host=host, port=4321, node_rank=rank, dist_init_addr="10.0.0.3:5000", device="cuda")
        options = options_of(plan(section, place))
        assert options["--nnodes"] == ["2"] and options["--dist-init-addr"] == ["10.0.0.3:5000"]
        assert options["--tp-size"] == ["16"] and options["--host"] == [host]
        ranks.append(options["--node-rank"])
    assert ranks == [["0"], ["1"]]
    with pytest.raises(ValueError, match="dist_init_addr"):
        plan(section, GPU)


def test_cpu_environment():
    env = plan(SglangSection(tp_size=2)).env
    assert env["SGLANG_USE_CPU_ENGINE"] == "1" and env["CUDA_VISIBLE_DEVICES"] == "" and env["OMP_NUM_THREADS"] == "2"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert (Path(env["PYTHONPATH"]) / "sitecustomize.py").is_file()
    crowded = plan(SglangSection(tp_size=3), EnginePlace(port=1, cpu_cores=(2, 8)))
    assert crowded.env["SGLANG_CPU_OMP_THREADS_BIND"] == "2|8|2" and crowded.env["OMP_NUM_THREADS"] == "1"
    with pytest.raises(ValueError, match="cpu_cores"):
        plan(SglangSection(), EnginePlace(port=1))


def test_gpu_servers_are_as_released():
    launch = plan(SglangSection(tp_size=8), GPU)
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES"} & set(launch.env)
    options = options_of(launch)
    assert options["--device"] == ["cuda"] and "--attention-backend" not in options
    assert launch.env["MEGATRON_RL_RECEIVER_DIR"] == "/w/receivers"
    assert launch.env["MEGATRON_RL_RECEIVER_HOST"] == "10.0.0.3"


def test_the_memory_saver_is_on_where_trainers_share_the_gpus_alone():
    shared = plan(SglangSection(tp_size=8), replace(GPU, gives_memory_up=True))
    assert options_of(shared)["--enable-memory-saver"] == []
    for place in (GPU, replace(CPU, gives_memory_up=True)):
        assert "--enable-memory-saver" not in options_of(plan(SglangSection(), place))
