"""Cases in the golden format with other parameters and other batches, computed by plain loops over rows and tokens.

An independent reference: nothing of `megatron_rl` is imported. Gradients are central differences; what an objective
detaches is read from a frozen copy of the log-probs.
"""

from __future__ import annotations

import json
from pathlib import Path

from plain_loops import make_batch
from plain_policy import policy_cases
from plain_values import advantage_cases, aggregation_cases, correction_cases, kl_cases


def write_variants(folder: Path, seed: int) -> int:
    """Write `batch.json` and five files of cases; returns how many."""
    batch = make_batch(seed)
    files = {
        "policy_losses.json": policy_cases(batch),
        "rollout_correction.json": correction_cases(batch),
        "advantages.json": advantage_cases(batch),
        "kl.json": kl_cases(batch),
    }
    (folder / "batch.json").write_text(json.dumps(batch))
    for name, cases in files.items():
        (folder / name).write_text(json.dumps({"cases": cases}))
    loss_matrix = [[float(abs(a) + 0.1) for a in row] for row in batch["adv_tok"]]
    aggregation = {"loss_mat_values": loss_matrix, "ranks": "rows [0:2] and [2:6] and [6:9]"}
    aggregation["cases"] = aggregation_cases(loss_matrix)
    (folder / "aggregation.json").write_text(json.dumps(aggregation))
    return sum(map(len, files.values())) + len(aggregation["cases"])
