"""What the sampler draws: the right distribution, the asked cut, and the same token for the same seed and position."""

from __future__ import annotations

import pytest
import torch

from services.engine.embedded.sampler import Draws, draw, uniform

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf"), 0.5, 3.0])


def many(count: int, **options) -> torch.Tensor:
    draws = Draws(torch.arange(count) * 7919, torch.full((count,), 5), **options)
    return draw(LOGITS.expand(count, -1), draws).tokens


def counted(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


def test_the_noise_is_uniform_and_differs_with_seed_and_position():
    noise = uniform(torch.arange(-5000, 5000), torch.zeros(10000, dtype=torch.int64))
    assert noise.min() > 0
    assert noise.max() < 1
    assert torch.histc(noise.float(), 10, 0, 1).sub(1000).abs().max() < 150
    along = uniform(torch.full((10000,), 3), torch.arange(10000))
    assert torch.histc(along.float(), 10, 0, 1).sub(1000).abs().max() < 150
    assert len(torch.cat([noise, along[1:]]).unique()) == 19999
    assert torch.corrcoef(torch.stack([along[:-1], along[1:]]))[0, 1].abs() < 0.05


def test_the_noise_is_splitmix64_and_will_not_change_unnoticed():
    found = uniform(torch.tensor([0, 1, -(2**63)]), torch.tensor([0, 1, 9]))

    def reference(seed: int, position: int) -> float:
        def mix(x: int) -> int:
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            return x ^ (x >> 31)

        gamma = 0x9E3779B97F4A7C15
        return ((mix((mix((seed + gamma) % 2**64) + position * gamma) % 2**64) >> 24) + 0.5) / 2**40

    assert found.tolist() == [reference(0, 0), reference(1, 1), reference(2**63, 9)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature: float):
    count = 40000
    found = counted(many(count, temperature=torch.full((count,), temperature)))
    assert (found - (LOGITS / temperature).softmax(-1)).abs().max() < 0.01


def test_greedy_takes_the_largest_and_reports_its_logprob_at_temperature_one():
    drawn = draw(LOGITS[None], Draws(torch.tensor([3]), torch.tensor([0]), temperature=torch.tensor([0.0])))
    assert drawn.tokens.item() == 6
    assert drawn.logprobs.item() == pytest.approx(LOGITS.log_softmax(-1)[6].item(), abs=1e-6)


def test_top_k_draws_only_the_k_largest_by_their_ratio():
    found = counted(many(20000, top_k=torch.full((20000,), 2)))
    assert found.nonzero()[:, 0].tolist() == [2, 6]
    assert found[6] / found[2] == pytest.approx(torch.e, rel=0.1)


def test_top_p_draws_the_smallest_set_that_reaches_p():
    shares = LOGITS.softmax(-1)
    wanted = (shares[6] + shares[2]).item()
    below = counted(many(20000, top_p=torch.full((20000,), wanted - 0.01)))
    above = counted(many(20000, top_p=torch.full((20000,), wanted + 0.01)))
    assert below.nonzero()[:, 0].tolist() == [2, 6]
    assert above.nonzero()[:, 0].tolist() == [1, 2, 6]


def test_a_row_without_a_cut_is_drawn_from_everything_beside_rows_with_one():
    count = 20000
    top_k = torch.tensor([1, 0]).repeat(count // 2)
    tokens = many(count, top_k=top_k)
    assert set(tokens[0::2].tolist()) == {6}
    assert set(tokens[1::2].tolist()) == {0, 1, 2, 3, 5, 6}
    assert torch.equal(tokens[1::2], many(count)[1::2])


def test_logprobs_are_over_the_whole_vocabulary_even_when_cut():
    logits = torch.randn(16, 1000)
    draws = Draws(torch.arange(16), torch.arange(16), temperature=torch.full((16,), 0.7), top_k=torch.full((16,), 5))
    drawn = draw(logits, draws)
    expected = (logits / 0.7).log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, expected, atol=2e-6, rtol=1e-6)


def test_a_row_is_bitwise_the_same_alone_and_among_others():
    logits = torch.randn(40, 5000).bfloat16()
    seeds, positions = torch.arange(40), torch.arange(40) + 3
    every = draw(logits, Draws(seeds, positions, temperature=torch.full((40,), 0.9)))
    for row in (0, 17, 39):
        cut = slice(row, row + 1)
        one = draw(logits[cut], Draws(seeds[cut], positions[cut], temperature=torch.full((1,), 0.9)))
        assert one.tokens.item() == every.tokens[row].item()
        assert torch.equal(one.logprobs, every.logprobs[cut])


def test_the_most_probable_tokens_come_in_order_with_their_logprobs():
    drawn = draw(LOGITS[None], Draws(torch.tensor([1]), torch.tensor([1]), num_top=3))
    assert drawn.top_tokens is not None
    assert drawn.top_logprobs is not None
    assert drawn.top_tokens.tolist() == [[6, 2, 1]]
    torch.testing.assert_close(drawn.top_logprobs[0], LOGITS.log_softmax(-1)[[6, 2, 1]], atol=1e-6, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn_at_the_ends():
    logits = torch.full((2, 700), float("-inf"))
    logits[:, [0, 300]] = 0.0
    tokens = {draw(logits, Draws(torch.tensor([s, s + 1]), torch.tensor([0, 0]))).tokens[0].item() for s in range(200)}
    assert tokens == {0, 300}
