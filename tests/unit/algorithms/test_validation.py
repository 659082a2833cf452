from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.algorithms.validation import check_section
from megatron_rl.config.sections import AlgorithmSection, CorrectionSection, KlSection

PPO = AlgorithmSection(name="grpo", loss="ppo", clip_low=0.2, clip_high=0.28, aggregation="token-mean")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            replace(PPO, loss="gspo"),
            "aggregation=token-mean contradicts algorithm.loss=gspo: write seq-mean-token-mean",
        ),
        (replace(PPO, name="dr_grpo"), "contradicts algorithm.name=dr_grpo: write seq-mean-token-sum-norm"),
        (replace(PPO, aggregation="seq-mean-token-sum-norm"), "needs algorithm.aggregation_constant > 0"),
        (replace(PPO, aggregation_constant=16.0), "aggregation_constant has no meaning with token-mean: write null"),
        (replace(PPO, clip_low=1.5), "clip_low=1.5 lets the ratio go below 0"),
        (replace(PPO, clip_low=-0.1), "clip_low=-0.1 is negative"),
        (replace(PPO, clip_high=-0.1), "clip_high=-0.1 is negative"),
        (replace(PPO, dual_clip=0.9), "dual_clip=0.9 must exceed 1: write 3.0"),
        (replace(PPO, loss="cispo", dual_clip=3.0), "dual_clip has no meaning with algorithm.loss=cispo"),
        (replace(PPO, lambda_actor=1.2), r"lambda_actor=1.2 is outside \[0, 1\]"),
        (replace(PPO, lambda_critic=-0.2), r"lambda_critic=-0.2 is outside \[0, 1\]"),
        (replace(PPO, gamma=2.0), r"gamma=2.0 is outside \[0, 1\]"),
        (replace(PPO, gamma=0.9), "gamma has no meaning with algorithm.advantage=grpo: write 1.0"),
        (replace(PPO, lambda_alpha=0.0), "lambda_alpha=0.0 must be above 0: write 0.05"),
        (replace(PPO, advantage_ddof=2), "advantage_ddof=2: write 0 or 1"),
        (replace(PPO, advantage_epsilon=-1e-6), "advantage_epsilon=-1e-06: write 1e-6"),
        (replace(PPO, correction=CorrectionSection("icepop", 5.0, 0.5)), "low=5.0 is not below .*high=0.5: swap them"),
        (replace(PPO, loss="aipo", correction=CorrectionSection("tis")), "kind=tis would count it twice: write none"),
        (replace(PPO, kl=KlSection(-0.1)), "kl.coefficient=-0.1 is negative"),
        (replace(PPO, kl=KlSection(0.1, placement="reward")), "placement=reward needs per-token advantages"),
        (
            replace(PPO, advantage="gae", kl=KlSection(0.1, "unbiased", "reward")),
            "unbiased is a form for the loss: write k1",
        ),
        (replace(PPO, loss="trpo"), "loss='trpo' is not known: write one of ppo"),  # type: ignore[arg-type]
        (replace(PPO, advantage="a2c"), "advantage='a2c' is not known: write one of grpo"),  # type: ignore[arg-type]
    ],
)
def test_contradictions_are_refused_in_one_line(section: AlgorithmSection, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_section(section)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("algorithm.")


@pytest.mark.parametrize(
    "section",
    [
        AlgorithmSection(),
        PPO,
        replace(PPO, loss="cispo", clip_low=10.0),
        replace(PPO, loss="gspo_token", name="gspo"),
        replace(PPO, advantage="reinforce_pp", gamma=0.99, kl=KlSection(0.01, "k1", "reward")),
        replace(PPO, name="vapo", advantage="gae", lambda_alpha=0.05, positive_nll_coefficient=0.1),
    ],
)
def test_sane_sections_pass(section: AlgorithmSection) -> None:
    assert check_section(section) is None
