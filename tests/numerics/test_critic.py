"""The critic: values of the right tokens, an optimizer and a state of its own, by turns with the policy on a device."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_policies import VOCABULARY, make_groups

from paceline.config.trainer import TrainerConfig
from paceline.rpc import errors
from services.trainer.critic.critic import Critic
from services.trainer.critic.residency import Residency
from services.trainer.datum import Datum


def make(path: Path, dtype: str | None = None, critic: dict | None = None, **fields: object) -> Critic:
    optimizer = {"learning_rate": 3e-3}
    config = TrainerConfig.model_validate({"critic": {"optimizer": optimizer, **(critic or {})}, **fields})
    return Critic(path, config, 0, 10, dtype)


def give_head(critic: Critic, seed: int = 3) -> None:
    """A head that says something; a fresh one says 0."""
    with torch.no_grad():
        critic.model.head.weight.copy_(torch.randn(critic.model.head.weight.shape, generator=torch.manual_seed(seed)))
        critic.model.head.bias.fill_(0.5)


def with_returns(critic: Critic, groups: list[list[Datum]]) -> list[list[Datum]]:
    """Returns that the first token of the completion decides; values as they are now."""
    for group, values in zip(groups, critic.values(groups), strict=True):
        for datum, known in zip(group, values, strict=True):
            first = int(np.flatnonzero(datum.weights)[0])
            datum.values = known
            datum.returns = ((datum.token_ids[first - 1] % 2) * (datum.weights != 0)).astype(np.float32)
    return groups


def test_a_fresh_critic_says_zero(tiny_model: Path) -> None:
    for item in itertools.chain.from_iterable(make(tiny_model).values(make_groups([[3, 2]], [4]))):
        assert item.dtype == np.float32 and not item.any()


@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
def test_a_value_is_that_of_the_state_before_its_token(model: str, request: pytest.FixtureRequest) -> None:
    """Against transformers on each sequence alone: entry t reads the hidden state at t - 1, also in shared rows."""
    path = request.getfixturevalue(model)
    critic = make(path, "float64")
    give_head(critic)
    groups = make_groups([[3, 7, 1], [4]], [6, 2])
    backbone = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).base_model.eval()
    head = critic.model.head
    for group, values in zip(groups, critic.values(groups), strict=True):
        for datum, found in zip(group, values, strict=True):
            with torch.no_grad():
                hidden = backbone(input_ids=torch.from_numpy(datum.token_ids).long()[None]).last_hidden_state[0]
                plain = (hidden @ head.weight[0] + head.bias).float().numpy()
            trained = np.flatnonzero(datum.weights)
            np.testing.assert_allclose(found[trained], plain[trained - 1], rtol=1e-5, atol=1e-6)
            assert np.abs(found[trained] - plain[trained]).max() > 1e-2, "the next state is another"
            assert not found[datum.weights == 0].any()


def test_training_explains_the_returns(tiny_model: Path) -> None:
    critic = make(tiny_model, critic={"value_clip": 0, "epochs": 2})
    seen = [
        critic.train(step, with_returns(critic, make_groups([[3, 2]] * 16, [4] * 16, seed=step % 2)))
        for step in range(1, 21)
    ]
    assert seen[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6) and seen[0]["critic_updates"] == 2
    assert seen[-1]["explained_variance"] > 0.8
    assert seen[-1]["value_loss"] < 0.2 * seen[0]["value_loss"]
    assert seen[0]["critic_grad_norm"] > 0 and seen[0]["critic_learning_rate"] == 3e-3


def test_the_clip_holds_values_back(tiny_model: Path) -> None:
    held = make(tiny_model, critic={"value_clip": 0.01, "epochs": 6})
    free = make(tiny_model, critic={"value_clip": 0, "epochs": 6})
    groups = make_groups([[3, 2]] * 4, [4] * 4)
    assert held.train(1, with_returns(held, groups))["value_clip_fraction"] > 0.3
    assert free.train(1, with_returns(free, groups))["value_clip_fraction"] == 0.0


def test_numbers_do_not_depend_on_micro_batches(tiny_model: Path) -> None:
    found = []
    for budget in (1, 20, 4096):
        critic = make(tiny_model, "float64", tokens_per_micro_batch=budget)
        give_head(critic)
        found.append(critic.train(1, with_returns(critic, make_groups([[1, 9], [30, 2], [3, 3]], [4, 2, 5]))))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


def test_updates_of_an_epoch_are_spread_and_counted(tiny_model: Path) -> None:
    critic = make(tiny_model, critic={"epochs": 2, "updates_per_epoch": 2})
    assert critic.train(1, with_returns(critic, make_groups([[2, 2]] * 3, [4] * 3)))["critic_updates"] == 4


def test_nothing_to_train_on_trains_nothing(tiny_model: Path) -> None:
    critic = make(tiny_model)
    groups = with_returns(critic, make_groups([[2, 2]], [4]))
    for datum in groups[0]:
        datum.weights[:] = 0
    assert critic.train(1, groups)["critic_updates"] == 0 and critic.masters.updates == 0
    assert critic.train(1, [])["critic_updates"] == 0


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"critic": {"lora": {"rank": 2}}}])
def test_a_resumed_critic_is_the_same_bit_for_bit(tiny_model: Path, tmp_path: Path, fields: dict) -> None:
    def train(critic: Critic, steps: range) -> list[dict[str, float]]:
        return [
            critic.train(step, with_returns(critic, make_groups([[3, 2]] * 3, [4] * 3, seed=step))) for step in steps
        ]

    through, first, second, without = (make(tiny_model, **fields) for _ in range(4))
    train(through, range(1, 4))
    train(first, range(1, 4))
    first.save_state(tmp_path)
    first.finish_save()
    second.load_state(tmp_path)
    without.load_state(tmp_path, optimizer=False)
    expected = train(through, range(4, 6))
    assert train(second, range(4, 6)) == expected
    for name, tensor in through.masters.tensors.items():
        assert torch.equal(tensor, second.masters.tensors[name])
    assert train(without, range(4, 6)) != expected, "moments count"


def test_a_save_in_the_background_is_that_of_its_moment(tiny_model: Path, tmp_path: Path) -> None:
    critic, other = make(tiny_model), make(tiny_model)
    groups = make_groups([[3, 2]] * 6, [4] * 6)
    critic.train(1, with_returns(critic, groups))
    before = critic.model.head.weight.detach().clone()
    critic.save_state(tmp_path, background=True)
    critic.train(2, with_returns(critic, groups))
    critic.finish_save()
    other.load_state(tmp_path)
    assert torch.equal(other.model.head.weight.detach(), before) and not torch.equal(critic.model.head.weight, before)


def test_a_state_without_critic_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.FailedPrecondition, match=r"has no critic.*\[trainer\.critic\]"):
        make(tiny_model).load_state(tmp_path)


def test_making_a_critic_draws_nothing_from_the_policy(tiny_model: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make(tiny_model, critic={"lora": {"rank": 2}})
    assert torch.equal(torch.get_rng_state(), before)


def test_an_adapter_trains_adapter_and_head_only(tiny_model: Path) -> None:
    critic = make(tiny_model, critic={"lora": {"rank": 2}})
    assert all("lora_" in name or name.startswith("value_head.") for name in critic.masters.tensors)
    assert critic.train(1, with_returns(critic, make_groups([[3, 2]], [4])))["critic_updates"] == 1


def test_sleep_and_wake_may_be_repeated(tiny_model: Path) -> None:
    critic = make(tiny_model)
    swap = critic._swap
    for call, asleep, moves in (
        (critic.wake, False, 0), (critic.sleep, True, 1), (critic.sleep, True, 1), (critic.wake, False, 2),
        (critic.wake, False, 2),
    ):  # fmt: skip
        call()
        assert (critic.asleep, swap.moves) == (asleep, moves)
    critic.sleep()
    critic.values(make_groups([[2]], [3]))
    assert not critic.asleep, "work wakes it"


def test_a_critic_with_a_pending_gradient_does_not_sleep(tiny_model: Path) -> None:
    critic = make(tiny_model)
    critic.model.head.weight.grad = torch.ones_like(critic.model.head.weight)
    with pytest.raises(ValueError, match="gradient that waits"):
        critic.sleep()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_asleep_nothing_of_it_is_on_the_gpu(tiny_model: Path) -> None:
    critic = make(tiny_model, critic={"epochs": 2}, device="cuda")
    groups = make_groups([[3, 2]] * 4, [4] * 4)
    before = critic.train(1, with_returns(critic, groups))
    awake = torch.cuda.memory_allocated()
    identities = [id(item) for item in critic.masters.resident()]
    size = sum(item.nbytes for item in critic.masters.resident())
    critic.sleep()
    # Workspaces of the libraries stay, and outweigh a model this small.
    assert torch.cuda.memory_allocated() <= awake - size
    assert all(item.device.type == "cpu" for item in critic.masters.resident())
    critic.wake()
    assert [id(item) for item in critic.masters.resident()] == identities
    through = make(tiny_model, critic={"epochs": 2}, device="cuda")
    assert through.train(1, with_returns(through, groups)) == pytest.approx(before, rel=1e-4)
    expected = through.train(2, with_returns(through, groups))
    assert critic.train(2, with_returns(critic, groups)) == pytest.approx(expected, rel=1e-4)


class Named:
    """Writes down when it moves."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def sleep(self) -> None:
        self._log.append(f"{self._name} sleeps")

    def wake(self) -> None:
        self._log.append(f"{self._name} wakes")


def test_by_turns_the_one_leaves_before_the_other_comes() -> None:
    log: list[str] = []
    plan = Residency(Named("policy", log), Named("critic", log), by_turns=True)
    plan.turn_to_critic()
    plan.turn_to_policy()
    assert log == ["critic sleeps", "policy sleeps", "critic wakes", "critic sleeps", "policy wakes"]


def test_side_by_side_nobody_moves() -> None:
    log: list[str] = []
    plan = Residency(Named("policy", log), Named("critic", log), by_turns=False)
    plan.turn_to_critic()
    plan.turn_to_policy()
    assert log == []


def test_turns_need_a_policy_that_can_leave() -> None:
    with pytest.raises(ValueError, match=r"trainer\.critic\.offload: object cannot leave"):
        Residency(object(), Named("critic", []), by_turns=True)


def test_a_model_of_another_vocabulary_is_refused(tiny_model: Path) -> None:
    critic = make(tiny_model)
    groups = make_groups([[2]], [3])
    groups[0][0].token_ids[0] = VOCABULARY
    with pytest.raises(ValueError, match="outside the vocabulary"):
        critic.values(groups)
