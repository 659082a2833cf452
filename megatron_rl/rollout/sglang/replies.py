"""What we ask SGLang and what its answers mean: requests -> JSON, JSON -> segments. Pure.

Log-probs: SGLang returns log_softmax(logits / temperature) of the drawn token, over the full vocabulary (its logits at
temperature 0), computed before top-k and top-p cut the distribution. That is the distribution which was sampled from
only when both are off, so a request with either is refused here.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_rl.rollout.sglang.errors import EngineReplyError
from megatron_rl.types.rollout import (
    EngineLoad,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    RolloutSegment,
    SamplingParams,
)
from megatron_rl.types.routing import RoutingShape

_END_OF_ID = ";"
"""SGLang aborts every request whose id begins with the given one: without an end, sample 1 would take 10 to 15 along."""
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def build_generate_body(request: GenerationRequest, *, weights: str, return_routing: bool = False) -> dict[str, Any]:
    """The body of POST /generate; `return_routing` needs a server with --enable-return-routed-experts.

    `weights` names the weights that the request begins with: it takes no prefix from the cache that others computed.

    Raises ValueError for top-p or top-k: their log-probs would not be those of the sampled distribution.
    """
    return {
        "rid": request.request_id + _END_OF_ID,
        "input_ids": list(request.token_ids),
        "sampling_params": {**_sampling_params(request.sampling), "sampling_seed": _to_int64(request.seed)},
        "return_logprob": True,
        "extra_key": weights,
        **({"return_routed_experts": True} if return_routing else {}),
    }


def build_abort_body(request_id: str) -> dict[str, Any]:
    """The body of POST /abort_request."""
    return {"rid": request_id + _END_OF_ID}


def build_score_body(token_ids: Sequence[int]) -> dict[str, Any]:
    """The body of POST /generate that only asks for the log-probs of `token_ids` at temperature 1."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def to_segments(
    engine: str, reply: Mapping[str, Any], routing: RoutingShape | None = None
) -> tuple[RolloutSegment, ...]:
    """The segments of one answer, one per weight version; all but the last end with SWITCH. With `routing`, they tell the
    experts of every token (see `RolloutSegment.experts`).

    An answer that was aborted before its first token is one empty segment. Raises EngineReplyError if the reply does
    not hold one log-prob per token, or its version spans do not cover the tokens in order.
    """
    meta = _mapping(engine, reply, "meta_info")
    token_ids = _list(engine, reply, "output_ids")
    logprobs = _logprobs_of(engine, token_ids, meta.get("output_token_logprobs") or [])
    kind = (meta.get("finish_reason") or {}).get("type")
    if kind not in _FINISH_REASONS:
        raise EngineReplyError(f"engine {engine}: finish_reason {kind!r}, expected one of {sorted(_FINISH_REASONS)}")
    bounds, versions = _version_spans(engine, meta, len(token_ids))
    reasons = [FinishReason.SWITCH] * (len(versions) - 1) + [_FINISH_REASONS[kind]]
    experts: list[np.ndarray | None] = [None] * len(versions)
    if routing is not None and token_ids:
        rows = to_experts(engine, meta.get("routed_experts"), routing)
        before = len(rows) - len(token_ids)  # of the request's tokens, all but the last
        if before < 0:
            raise EngineReplyError(f"engine {engine}: {len(token_ids)} tokens but routed experts for {len(rows)}")
        experts = [rows[before + start if start else 0 : before + end] for start, end in pairwise(bounds)]
    return tuple(
        RolloutSegment(tuple(token_ids[start:end]), tuple(logprobs[start:end]), version, reason, rows)
        for (start, end), version, reason, rows in zip(pairwise(bounds), versions, reasons, experts, strict=True)
    )


def to_experts(engine: str, text: object, routing: RoutingShape) -> np.ndarray:
    """The experts [request + answer - 1 tokens, layers, k] of `meta_info.routed_experts`: base64 of int32, global ids.

    Raises EngineReplyError when they are missing, or are not those of this model.
    """
    if not isinstance(text, str):
        raise EngineReplyError(f"engine {engine}: no routed experts; start the server with --enable-return-routed-experts")
    flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    if flat.size % (routing.num_layers * routing.top_k):
        sizes = f"{routing.num_layers} layers x {routing.top_k} experts"
        raise EngineReplyError(f"engine {engine}: {flat.size} routed experts, expected a multiple of {sizes}")
    wide = flat.reshape(-1, routing.num_layers, routing.top_k)
    chosen = wide[:, routing.first_moe_layer :]
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < routing.num_experts):
        raise EngineReplyError(
            f"engine {engine}: routed experts {chosen.min()} to {chosen.max()}, expected 0 to {routing.num_experts - 1}"
        )
    experts = routing.empty(len(wide))
    experts[:, routing.first_moe_layer :] = chosen
    return experts


def to_scores(engine: str, token_ids: Sequence[int], reply: Mapping[str, Any]) -> list[float]:
    """Log-prob of each token given those before it; 0 for the first, which has none.

    SGLang 0.5.23 reports the last token id of the vocabulary as id 0 there, next to the right log-prob.
    """
    entries = _list(engine, _mapping(engine, reply, "meta_info"), "input_token_logprobs")
    if not entries or entries[0][0] is not None:
        raise EngineReplyError(f"engine {engine}: scores do not start at the first token")
    _check_count(engine, token_ids, entries)
    logprobs = [0.0, *(entry[0] for entry in entries[1:])]
    reported = [token_id if entry[1] == 0 else entry[1] for token_id, entry in zip(token_ids, entries, strict=True)]
    return _logprobs_of(engine, token_ids, list(zip(logprobs, reported, strict=True)))


def to_load(engine: str, reply: Mapping[str, Any]) -> EngineLoad:
    """The answer of GET /v1/loads: data-parallel ranks, of which our engines have one."""
    loads = _list(engine, reply, "loads")
    if len(loads) != 1 or not isinstance(loads[0], Mapping):
        raise EngineReplyError(f"engine {engine}: {len(loads)} loads, expected that of its one data-parallel rank")
    load = loads[0]
    try:
        return EngineLoad(
            num_running=load["num_running_reqs"],
            num_waiting=load["num_waiting_reqs"],
            kv_fraction=load["token_usage"],
            num_preempted=(load.get("queues") or {}).get("retracted", 0),
            num_prefill_tokens=load["total_prefill_uncached_tokens"],
            prefill_s=load["total_prefill_busy_us"] / 1e6,
        )
    except KeyError as error:
        raise EngineReplyError(f"engine {engine}: the load has no {error}") from error


def to_memory(engine: str, reply: Mapping[str, Any]) -> dict[str, int]:
    """The answer of GET /v1/loads?include=memory: bytes per part on one tensor-parallel rank."""
    loads = _list(engine, reply, "loads")
    memory = loads[0].get("memory") if loads and isinstance(loads[0], Mapping) else None
    if not isinstance(memory, Mapping):
        raise EngineReplyError(f"engine {engine}: the load says nothing of its memory")
    names = {"kv_cache": "kv_cache_gb", "weights": "weight_gb", "cuda_graph": "graph_gb"}
    return {part: int((memory.get(name) or 0.0) * 2**30) for part, name in names.items()}


def to_version(engine: str, text: object) -> PolicyVersion:
    if not isinstance(text, str) or not text.isdigit():
        raise EngineReplyError(f"engine {engine}: weight version {text!r}, expected a number")
    return PolicyVersion(int(text))


def _sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise ValueError(
            f"rollout.sampling: top_p={sampling.top_p}, top_k={sampling.top_k}: SGLang's log-probs are those of the "
            "full distribution, so training on a cut one would be biased; use top_p=1 and top_k=0"
        )
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        # With any stop token the end-of-sequence ids of the model folder stop as well; without one, nothing does.
        "ignore_eos": not sampling.stop_token_ids,
    }


def _to_int64(seed: int) -> int:
    """SGLang takes signed 64 bits; the low 64 bits of any other seed are kept."""
    return (seed + 2**63) % 2**64 - 2**63


def _logprobs_of(engine: str, token_ids: Sequence[int], entries: Sequence[Sequence[Any]]) -> list[float]:
    _check_count(engine, token_ids, entries)
    for position, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if entry[1] != token_id or not isinstance(entry[0], float):
            raise EngineReplyError(f"engine {engine}: token {token_id} at {position} has log-prob entry {entry}")
    return [entry[0] for entry in entries]


def _check_count(engine: str, token_ids: Sequence[int], entries: Sequence[Any]) -> None:
    if len(entries) != len(token_ids):
        raise EngineReplyError(f"engine {engine}: {len(token_ids)} tokens but {len(entries)} log-probs")


def _version_spans(engine: str, meta: Mapping[str, Any], num_tokens: int) -> tuple[list[int], list[PolicyVersion]]:
    """Bounds (one more than versions) of the spans in `meta_info.weight_versions`; one span if it lists none."""
    spans = [span for span in meta.get("weight_versions") or [] if span["start"] < span["end"]]
    if num_tokens == 0 or not spans:
        return [0, num_tokens], [to_version(engine, meta.get("weight_version"))]
    bounds = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != bounds[:-1] or bounds[-1] != num_tokens:
        raise EngineReplyError(f"engine {engine}: weight versions {spans} do not cover {num_tokens} tokens in order")
    return bounds, [to_version(engine, span["version"]) for span in spans]


def _mapping(engine: str, reply: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    if not isinstance(reply, Mapping) or not isinstance(reply.get(key), Mapping):
        raise EngineReplyError(f"engine {engine}: the reply has no {key}")
    return reply[key]


def _list(engine: str, reply: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(reply.get(key), list):
        raise EngineReplyError(f"engine {engine}: the reply has no list {key}")
    return reply[key]
