"""An embedded engine with its weight receivers in a process of its own: one JSON line per call on stdin, one answer on stdout.

The first line is the setup (family, dtype, tensor-parallel size, key); the answer holds the receivers' addresses. Then calls
{"call": name, "arguments": [...]} until stdin ends.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys

import torch

from gpu_check.models import DTYPES
from gpu_check.sizes import sizes_for
from megatron_rl.platforms.platform import CpuPlatform, select_platform
from megatron_rl.resharding.box_memory import bytes_of
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.rollout.embedded.engine import EmbeddedEngine


def hash_params(params: dict[str, torch.Tensor]) -> dict[str, str]:
    """Name -> BLAKE2b of a parameter's bytes."""
    held = {name: bytes_of(param.cpu().contiguous()) for name, param in params.items()}
    return {name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in held.items()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints to stdout must not stand between the answers
    setup = json.loads(sys.stdin.readline())
    platform = select_platform() if setup["device"] == "cuda" else CpuPlatform()
    dims = sizes_for(platform).models[setup["family"]]
    engine = EmbeddedEngine(
        dims, setup["tp"], DTYPES[setup["dtype"]], platform.device, num_slots=2, max_context=64, stop_token_ids=()
    )
    receivers = [Receiver(shard, base64.b64decode(setup["key"])) for shard in engine.weights.shards]
    for receiver in receivers:
        receiver.start()
    print(json.dumps([receiver.address for receiver in receivers]), file=answers)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request["call"] == "hash_params":
                result = [hash_params(shard) for shard in engine.weights.shards]
            else:
                result = asyncio.run(getattr(engine, request["call"])(*request["arguments"]))
            print(json.dumps(result), file=answers)
    finally:
        for receiver in receivers:
            receiver.close()
        engine.close()


if __name__ == "__main__":
    main()
