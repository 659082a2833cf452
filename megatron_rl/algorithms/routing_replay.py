"""Expert probabilities of a router, chosen by itself or replayed: the mask comes from elsewhere, the softmax from here.

Replay (arXiv 2510.11370): g_i = I_i exp(s_i) / sum_j I_j exp(s_j), with the experts I that the engine (R3) or the
trainer's own old pass (R2) chose and the trainer's logits s, so that the gradient reaches the router. An expert bias
takes part in the choice, never in the probabilities. Shape suffixes: _T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ScoreFunction = Literal["softmax_post", "softmax_pre", "sigmoid"]


def select_experts(
    logits_TE: Tensor,
    topk: int,
    score_function: ScoreFunction = "softmax_post",
    expert_bias_E: Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
) -> Tensor:
    """The k experts of each token, int64 [T, k], best first.

    With `num_groups`, the experts are divided into that many equal groups, of which the `group_topk` with the largest
    sum of their topk // group_topk best scores are eligible (DeepSeek-V3, arXiv 2412.19437 sec. 2.1.2).
    """
    scores_TE = logits_TE.detach()
    if score_function == "softmax_pre":
        scores_TE = torch.softmax(scores_TE, dim=-1)
    elif score_function == "sigmoid":
        scores_TE = torch.sigmoid(scores_TE)
    if expert_bias_E is not None:
        scores_TE = scores_TE + expert_bias_E
    if num_groups is not None:
        if group_topk is None:
            raise ValueError("num_groups without group_topk: say how many groups a token may use")
        grouped = scores_TE.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
        eligible = torch.zeros_like(group_scores, dtype=torch.bool)
        eligible.scatter_(-1, group_scores.topk(group_topk, dim=-1).indices, True)
        scores_TE = torch.where(eligible.unsqueeze(-1), grouped, -torch.inf).flatten(-2)
    return scores_TE.topk(topk, dim=-1).indices


def expert_probabilities(
    logits_TE: Tensor, experts_Tk: Tensor, score_function: ScoreFunction = "softmax_post", scaling: float = 1.0
) -> Tensor:
    """Probabilities [T, E], 0 outside `experts_Tk`, differentiable in the logits.

    softmax_post normalises over the chosen experts, softmax_pre over all of them, sigmoid divides the chosen scores by
    their sum; all times `scaling`.
    """
    chosen_Tk = logits_TE.gather(-1, experts_Tk)
    if score_function == "softmax_post":
        probabilities_Tk = torch.softmax(chosen_Tk, dim=-1)
    elif score_function == "softmax_pre":
        probabilities_Tk = torch.softmax(logits_TE, dim=-1).gather(-1, experts_Tk)
    elif score_function == "sigmoid":
        scores_Tk = torch.sigmoid(chosen_Tk)
        probabilities_Tk = scores_Tk / (scores_Tk.sum(dim=-1, keepdim=True) + 1e-20) if scores_Tk.shape[-1] > 1 else scores_Tk
    else:
        raise ValueError(f"score function {score_function!r} is not known: softmax_post, softmax_pre or sigmoid")
    return torch.zeros_like(logits_TE).scatter(-1, experts_Tk, probabilities_Tk * scaling)
