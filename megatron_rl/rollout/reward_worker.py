"""The process of `reward_pool`: reads one JSON request a line, writes one JSON answer a line.

It ends when its input ends. What a reward function prints goes to stderr, not between the answers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from megatron_rl.rewards.registry import CheckedReward, RewardError, load_reward
from megatron_rl.types.rollout import Prompt


def answer(request: dict[str, Any], rewards: dict[str, CheckedReward]) -> dict[str, Any]:
    """The reward; `refused` when the prompt or the function is to blame (RewardError), `crashed` for anything else."""
    try:
        name = request["reward"]
        if name not in rewards:
            rewards[name] = load_reward(name)
        result = rewards[name](Prompt(**request["prompt"]), request["text"], request["is_finished"])
    except RewardError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 (a reward is foreign code; its failure is an answer)
        return {"crashed": f"{type(error).__name__}: {error}"}
    return {"reward": result.reward, "is_correct": result.is_correct, "details": dict(result.details)}


def main(memory_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rewards: dict[str, CheckedReward] = {}
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), rewards)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
