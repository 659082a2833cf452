import base64
import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.sglang.errors import EngineReplyError
from megatron_rl.rollout.sglang.replies import build_generate_body, build_score_body, to_load, to_scores, to_segments
from megatron_rl.types.rollout import EngineLoad, FinishReason, GenerationRequest, SamplingParams
from megatron_rl.types.routing import RoutingShape


def make_reply(num_tokens=5, spans=(("7", 0, 3), ("8", 3, 5)), kind="stop"):
    return {
        "output_ids": [100 + i for i in range(num_tokens)],
        "meta_info": {
            "finish_reason": {"type": kind},
            "weight_version": "8",
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
            "output_token_logprobs": [[-0.5 * i, 100 + i, None] for i in range(num_tokens)],
        },
    }


def request(seed=3, **sampling):
    return GenerationRequest("r-1", (4, 5, 6), SamplingParams(max_new_tokens=9, **sampling), seed)


def test_body():
    body = build_generate_body(request(temperature=0.7, stop_token_ids=(2, 9)), weights="w1")
    assert body["rid"] == "r-1;" and body["input_ids"] == [4, 5, 6]
    assert body["extra_key"] == "w1" and body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [2, 9],
        "ignore_eos": False,
        "sampling_seed": 3,
    }
    assert build_generate_body(request(), weights="w1")["sampling_params"]["ignore_eos"] is True
    assert build_score_body([3, 1])["logprob_start_len"] == 0


@given(st.integers(min_value=-(2**70), max_value=2**70))
def test_seeds_fit_64_bits_and_keep_the_low_ones(seed):
    sent = build_generate_body(request(seed=seed), weights="w1")["sampling_params"]["sampling_seed"]
    assert -(2**63) <= sent < 2**63 and (sent - seed) % 2**64 == 0


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
def test_cut_distributions_are_refused_with_the_reason(cut):
    with pytest.raises(ValueError, match=r"rollout\.sampling.*full distribution"):
        build_generate_body(request(**cut), weights="w1")


SHAPE = RoutingShape(num_layers=3, top_k=2, num_experts=9, first_moe_layer=1)


def encoded(experts):
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def experts_text(num_rows):
    """Row r, layer y, choice k: (r + 2 y + k) % 9; the dense layer holds what nobody should read."""
    experts = (np.arange(num_rows)[:, None, None] + 2 * np.arange(3)[:, None] + np.arange(2)) % 9
    experts[:, 0] = -1
    return encoded(experts)


def test_experts_go_to_the_segment_whose_tokens_they_led_to():
    reply = make_reply()
    reply["meta_info"]["routed_experts"] = experts_text(3 + 5 - 1)  # a request of 3 tokens
    first, second = to_segments("e", reply, SHAPE)
    assert first.experts.dtype == np.uint8 and first.experts.shape == (3 + 3 - 1, 3, 2) and second.experts.shape == (2, 3, 2)
    assert first.experts[:, 1, 0].tolist() == [2, 3, 4, 5, 6] and second.experts[:, 1, 0].tolist() == [7, 8]
    assert set(first.experts[:, 0].ravel()) == {255}
    assert to_segments("e", make_reply())[0].experts is None
    assert build_generate_body(request(), weights="w1", return_routing=True)["return_routed_experts"] is True
    assert "return_routed_experts" not in build_generate_body(request(), weights="w1")


def test_experts_that_cannot_be_are_refused():
    reply = make_reply()
    for text, reason in [
        (None, "enable-return-routed-experts"),
        (experts_text(4), "5 tokens but routed experts for 4"),
        (encoded(np.arange(7)), "7 routed experts, expected a multiple of 3 layers"),
        (encoded(np.full(42, 9)), "9 to 9, expected 0 to 8"),
    ]:
        reply["meta_info"]["routed_experts"] = text
        with pytest.raises(EngineReplyError, match=reason):
            to_segments("e", reply, SHAPE)


def test_one_segment_per_version():
    first, second = to_segments("e", make_reply())
    assert (first.token_ids, first.policy_version, first.finish_reason) == ((100, 101, 102), 7, FinishReason.SWITCH)
    assert (second.token_ids, second.policy_version, second.finish_reason) == ((103, 104), 8, FinishReason.STOP)
    assert first.logprobs + second.logprobs == (0.0, -0.5, -1.0, -1.5, -2.0)


@given(st.lists(st.integers(min_value=1, max_value=6), min_size=1, max_size=5))
def test_any_spans_are_kept_in_order(lengths):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [(str(20 + i), bounds[i], bounds[i + 1]) for i in range(len(lengths))]
    segments = to_segments("e", make_reply(bounds[-1], spans, "length"))
    assert [len(segment.token_ids) for segment in segments] == lengths
    assert [segment.policy_version for segment in segments] == [20 + i for i in range(len(lengths))]
    assert {segment.finish_reason for segment in segments[:-1]} <= {FinishReason.SWITCH}


def test_an_abort_before_the_first_token_is_one_empty_segment():
    reply = make_reply(0, [("8", 0, 0)], "abort")
    del reply["meta_info"]["output_token_logprobs"]
    (segment,) = to_segments("e", reply)
    assert segment.token_ids == () and segment.policy_version == 8 and segment.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["meta_info"]["output_token_logprobs"].pop(), "5 tokens but 4 log-probs"),
        (lambda r: r["meta_info"].update(output_token_logprobs=None), "5 tokens but 0 log-probs"),
        (lambda r: r["meta_info"]["output_token_logprobs"][2].__setitem__(1, 7), "token 102 at 2 .*7"),
        (lambda r: r["meta_info"]["output_token_logprobs"][2].__setitem__(0, None), "token 102 at 2 .*None"),
        (lambda r: r["meta_info"].update(finish_reason=None), "finish_reason None"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "odd"}), "finish_reason 'odd'"),
        (lambda r: r["meta_info"]["weight_versions"].pop(), "do not cover 5 tokens"),
        (lambda r: r["meta_info"]["weight_versions"][1].update(start=2), "do not cover 5 tokens"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(version="default"), "version 'default'"),
        (lambda r: r.pop("output_ids"), "no list output_ids"),
        (lambda r: r.pop("meta_info"), "no meta_info"),
    ],
)
def test_a_malformed_reply_is_one_clear_line(change, message):
    reply = copy.deepcopy(make_reply())
    change(reply)
    with pytest.raises(EngineReplyError, match=f"^engine e: .*{message}"):
        to_segments("e", reply)


def test_a_load():
    load = {
        "num_running_reqs": 3, "num_waiting_reqs": 2, "token_usage": 0.25, "queues": {"retracted": 1},
        "total_prefill_uncached_tokens": 900, "total_prefill_busy_us": 1_500_000,
    }  # fmt: skip
    assert to_load("e", {"loads": [load]}) == EngineLoad(3, 2, 0.25, 1, 900, 1.5)
    with pytest.raises(EngineReplyError, match="engine e: 2 loads"):
        to_load("e", {"loads": [load, load]})
    del load["token_usage"]
    with pytest.raises(EngineReplyError, match="engine e: the load has no 'token_usage'"):
        to_load("e", {"loads": [load]})


def test_scores():
    entries = [[None, 5, None], [-1.5, 9, None], [-0.25, 0, None]]  # 0 is how the last id of the vocabulary comes back
    assert to_scores("e", [5, 9, 210], {"meta_info": {"input_token_logprobs": entries}}) == [0.0, -1.5, -0.25]
    with pytest.raises(EngineReplyError, match="2 tokens but 3"):
        to_scores("e", [5, 9], {"meta_info": {"input_token_logprobs": entries}})
    with pytest.raises(EngineReplyError, match="do not start at the first token"):
        to_scores("e", [9, 210], {"meta_info": {"input_token_logprobs": entries[1:]}})
