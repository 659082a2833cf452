from __future__ import annotations

import torch

from megatron_rl.rollout.embedded.kv_cache import KVCache
from tests.unit.rollout.embedded.engine_models import MOE


def test_prompts_tokens_and_moves_land_in_their_slots() -> None:
    cache = KVCache(MOE, tp=4, num_slots=5, max_context=7, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 4, MOE.head_dim, generator=generator)  # two slots, three positions, 4 heads
    cache.write_prompts(1, torch.tensor([2, 0]), keys, values)
    key, value = torch.randn(2, 3, 4, MOE.head_dim, generator=generator)
    cache.write_tokens(1, torch.tensor([0 * 7 + 3, 1 * 7 + 0, 2 * 7 + 3]), key, value)
    read_keys, read_values = cache.read(1, num_sequences=3, length=4)
    assert read_keys.shape == (3, 4, 4, MOE.head_dim)
    torch.testing.assert_close(read_keys[2].transpose(0, 1), torch.cat((keys[0], key[2:])))
    torch.testing.assert_close(read_values[0].transpose(0, 1), torch.cat((values[1], value[:1])))
    torch.testing.assert_close(read_keys[1, :, 0], key[1])
    cache.move(source=2, target=4, length=4)
    assert torch.equal(cache.data[:, 1, 4], cache.data[:, 1, 2])
    assert not cache.data[:, 0].any() and not cache.data[:, 2].any()
    cache.clear()
    assert not cache.data.any()
