"""Which transport a pair gets, and why not another."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.resharding.host import describe_host
from megatron_rl.resharding.transports import table

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def here():
    return describe_host(CPU)


def test_ranks_of_one_machine_hand_memory_over(here):
    assert table.choose_transport("auto", here, dict(here), CPU) == "shared_memory"
    assert table.choose_transport("ipc", here, dict(here), CPU) == "shared_memory"
    assert table.choose_transport("p2p", here, dict(here), CPU) == "socket"
    assert table.choose_transport("socket", here, dict(here), CPU) == "socket"
    assert table.choose_transport("disk", here, dict(here), CPU) == "disk"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot": "another"}, "different machines"),
        ({"pid_namespace": "pid:[1]"}, "different containers"),
        ({"user": 4242}, "different users"),
        ({"device": "cuda"}, "not in host memory"),
    ],
)
def test_what_is_in_the_way_is_said(here, change, reason):
    there = here | change
    assert table.choose_transport("auto", here, there, CPU) == "socket"
    with pytest.raises(ValueError, match=rf"sync\.transport=ipc: .*{reason}.*; use auto or p2p"):
        table.choose_transport("ipc", here, there, CPU)


@pytest.fixture
def on_gpu(here, monkeypatch):
    monkeypatch.setattr(table, "gpu_uuid", lambda device: "GPU-a")
    return here | {"device": "cuda", "gpu": "GPU-a", "gpus": ["GPU-a"], "nccl": 22705}


def test_gpus_are_told_by_their_names(here, on_gpu):
    assert table.choose_transport("auto", on_gpu, on_gpu | {"gpus": ["GPU-b", "GPU-a"]}, GPU) == "cuda_ipc"
    assert table.choose_transport("auto", on_gpu, on_gpu | {"gpu": "GPU-b", "gpus": ["GPU-b"]}, GPU) == "nccl"
    assert table.choose_transport("auto", on_gpu, on_gpu | {"gpu": "GPU-b", "boot": "another"}, GPU) == "nccl"
    with pytest.raises(ValueError, match="does not see the trainer's GPU GPU-a"):
        table.choose_transport("ipc", on_gpu, here, GPU)


def test_nccl_joins_two_gpus_of_one_version(here, on_gpu):
    other = on_gpu | {"gpu": "GPU-b", "gpus": ["GPU-b"]}
    assert table.choose_transport("p2p", on_gpu, other, GPU) == "nccl"
    assert table.choose_transport("socket", on_gpu, other, GPU) == "socket"
    for there in (other | {"nccl": 22602}, other | {"nccl": None}, on_gpu, here):
        assert table.choose_transport("p2p", on_gpu, there, GPU) == "socket"
    assert table.choose_transport("p2p", on_gpu | {"nccl": None}, other, GPU) == "socket"
    assert table.choose_transport("p2p", here, other, CPU) == "socket"
