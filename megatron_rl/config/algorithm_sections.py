"""The sections of the objective: what a score becomes, what a token's loss is, what is added, multiplied or left out.

Every choice in which systems differ is a key here, with its default. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.config.layout_section import LayoutSection


@dataclass(frozen=True, slots=True)
class KlSection:
    """KL to the reference. `coefficient` 0 is off."""

    coefficient: float = 0.0
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    placement: Literal["loss", "reward"] = "loss"


@dataclass(frozen=True, slots=True)
class ReferenceSection:
    """Who the reference of the KL is: the policy as RL began, or a teacher."""

    path: str | None = None
    """A teacher's Hugging Face folder: the policy's architecture, or on ranks of its own any with the policy's vocabulary.
    None: the policy at the beginning of RL."""
    refresh_interval: int | None = None
    """Take the policy as the new reference every n training steps; None: fixed."""
    storage: Literal["device", "cpu"] = "device"
    """Where its weights wait between the passes in which they are swapped into the policy."""
    layout: LayoutSection | None = None
    """Ranks of its own, beside the trainer's; None: its weights are swapped into the policy for a pass."""


@dataclass(frozen=True, slots=True)
class CorrectionSection:
    """Train-inference correction f(old/rollout), detached; see docs/algorithms.md."""

    kind: Literal[
        "none",
        "tis",
        "icepop",
        "sequence_tis",
        "sequence_mask",
        "geometric_tis",
        "geometric_mask",
        "binary_kl_mask",
        "tv_mask",
        "opsm",
    ] = "none"
    low: float | None = None
    high: float | None = None
    denominator: Literal["original", "remaining"] = "original"
    """What the loss is divided by once tokens are rejected: the counts from before, so that each rejected token lowers the
    gradient, or the counts of what remains (verl), as if rejected tokens had never been in the loss mask."""
    max_version_age: int | None = None
    """Tokens sampled more than this many weight versions before the one being trained get weight 0; None: off."""


@dataclass(frozen=True, slots=True)
class CovarianceSection:
    """Which tokens losses clip_cov and kl_cov treat apart (arXiv 2505.22617), out of the whole minibatch."""

    fraction: float = 2e-4
    low: float = 1.0
    """clip_cov: candidates have a covariance between `low` and `high`."""
    high: float = 5.0
    kl_coefficient: float = 1.0
    """kl_cov: the weight of |log r| on the chosen tokens."""


@dataclass(frozen=True, slots=True)
class VespoSection:
    """The shape W^k exp(lambda (1 - W)) of loss vespo (arXiv 2602.10693), by the sign of the advantage."""

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0


@dataclass(frozen=True, slots=True)
class OverlongSection:
    """DAPO's soft over-long punishment (arXiv 2503.14476 eq. 13), added to the reward. Independent of `mask_truncated`."""

    buffer_tokens: int | None = None
    """The ramp's width: 0 up to max_tokens - buffer_tokens, then falling to -1 at max_tokens. None: off."""
    max_tokens: int | None = None
    """None: rollout.sampling.max_new_tokens."""
    coefficient: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplaySection:
    """Prioritised replay: recent groups trained once more, drawn by mean |advantage|. `num_groups` 0 is off."""

    num_groups: int = 0
    """Old groups added to each training step."""
    num_steps: int = 4
    """Groups of this many recent steps are kept."""
    alpha: float = 0.6
    """A group is drawn in proportion to priority^alpha; 0: uniformly."""
    beta: float = 0.4
    """Its advantages are multiplied by (N p)^-beta, at most 1 (arXiv 1511.05952 sec. 3.4); 1: no bias from the draw."""


@dataclass(frozen=True, slots=True)
class AlgorithmSection:
    """The objective. Presets for every name live in configs/algorithms/."""

    name: str = "gspo"
    advantage: Literal["grpo", "dr_grpo", "rloo", "leave_one_out", "opo", "reinforce_pp", "reinforce_pp_baseline", "gae"] = (
        "grpo"
    )
    advantage_epsilon: float = 1e-6
    advantage_ddof: int = 1
    advantage_of_one: Literal["zero", "reward"] = "zero"
    """What a group of one sample gets: 0 (NeMo) or its reward, as if its baseline were 0 (verl)."""
    loss: Literal[
        "ppo",
        "gspo",
        "gspo_token",
        "cispo",
        "sapo",
        "gmpo",
        "vespo",
        "dppo_tv",
        "dppo_kl",
        "clip_cov",
        "kl_cov",
        "reinforce",
        "aipo",
        "none",
    ] = "gspo"
    """`none`: no policy term; what is learned is the KL to the reference (on-policy distillation)."""
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    max_ratio: float = 20.0
    """dppo_tv, dppo_kl: the importance weight is truncated here."""
    tau_positive: float = 1.0
    """sapo: the temperature of tokens with A > 0."""
    tau_negative: float = 1.05
    covariance: CovarianceSection = field(default_factory=CovarianceSection)
    vespo: VespoSection = field(default_factory=VespoSection)
    aggregation: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    aggregation_constant: float | None = None
    """The constant of seq-mean-token-sum-norm (Dr. GRPO): usually rollout.sampling.max_new_tokens."""
    masked_sequences: Literal["leave_out", "count"] = "leave_out"
    """Whether a sequence without a trained token counts in the denominators of seq-mean-* (TRL counts it)."""
    entropy_coefficient: float = 0.0
    kl: KlSection = field(default_factory=KlSection)
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    correction: CorrectionSection = field(default_factory=CorrectionSection)
    router_replay: Literal["off", "r2", "r3"] = "off"
    """Which experts MoE layers visit in training: their own choice, that of the trainer's pass before the first step of a
    batch (r2), or the engine's (r3)."""
    mask_truncated: bool = False
    """DAPO's over-long filter: answers that ended on the length limit train no token."""
    overlong_punishment: OverlongSection = field(default_factory=OverlongSection)
    gamma: float = 1.0
    lambda_actor: float = 1.0
    lambda_critic: float = 1.0
    lambda_alpha: float | None = None
    """Length-adaptive lambda 1 - 1/(alpha l) (VAPO); None: `lambda_actor`."""
    whiten_advantages: bool = True
    """gae, reinforce_pp and reinforce_pp_baseline: mean 0 and variance 1 over all tokens of the step."""
    positive_nll_coefficient: float = 0.0
    skip_zero_variance_groups: bool = False
    """Leave groups whose samples all got one score out of the batch (they carry no policy gradient)."""
    group_filter_metric: Literal["correctness", "reward"] = "correctness"
    """Which score `skip_zero_variance_groups` reads: the unshaped one, or the reward with its shaping."""
    replay: ReplaySection = field(default_factory=ReplaySection)
