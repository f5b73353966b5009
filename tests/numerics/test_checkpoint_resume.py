"""A resumed run is the same run, bit for bit; and what would not be, is seen to differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny_policies import make_groups

from paceline.config.trainer import LoraConfig, TrainerConfig
from paceline.rpc import errors
from services.trainer.backends.torch import TorchBackend
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.losses.ppo import Ppo
from services.trainer.objective import Objective

PARAMETERS_FILE, OPTIMIZER_FILE = "parameters/rank-00000.safetensors", "optimizer/rank-00000.safetensors"
PPO = Objective(Ppo(Ppo.Options()))
VARIANTS = {
    "full float32": {},
    "full bfloat16": {"dtype": "bfloat16"},
    "lora float32": {"lora": LoraConfig(rank=4)},
    "lora bfloat16 with dropout": {"lora": LoraConfig(rank=4, dropout=0.1), "dtype": "bfloat16"},
}


def make(path: Path, variant: str) -> TorchBackend:
    return TorchBackend(path, TrainerConfig.model_validate(VARIANTS[variant]), 0)


def train(backend: TorchBackend, steps: range) -> list[float]:
    """Train; the loss and gradient norm of every step."""
    seen = []
    for step in steps:
        groups = make_groups([[3, 5], [4, 2], [6, 1]], [6, 9, 4], seed=step)
        for datum in [datum for group in groups for datum in group]:
            datum.behaviour_logprobs = None
        result = backend.forward_backward(groups, PPO)
        outcome = backend.optim_step(result.num_tokens, 0.01)
        seen += [result.loss_sum, outcome.grad_norm]
    return seen


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    used = {f"used.{name}": item.detach().clone() for name, item in backend.policy.trainable.items()}
    return {**{name: item.detach().clone() for name, item in backend.masters.tensors.items()}, **used}


def saved(backend: TorchBackend, root: Path, **options: bool) -> Checkpoint:
    backend.save_state(CheckpointStore(root, 2).stage("step-000003"), **options)
    backend.finish_save()
    CheckpointStore(root, 2).publish_step(3, 4, {}, {})
    found = CheckpointStore(root, 2).newest()
    assert found is not None
    return found


def files(backend: TorchBackend, directory: Path) -> dict[str, bytes]:
    """The whole state as its files."""
    directory.mkdir()
    backend.save_state(directory)
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted(tiny_model: Path, tmp_path: Path, variant: str) -> None:
    first = make(tiny_model, variant)
    train(first, range(3))
    checkpoint = saved(first, tmp_path)
    wanted = train(first, range(3, 6))
    torch.manual_seed(12345)
    second = make(tiny_model, variant)
    second.load_state(checkpoint.directory)
    assert train(second, range(3, 6)) == wanted
    assert equal(weights(second), weights(first))
    assert second.updates == first.updates == 6
    assert files(second, tmp_path / "second") == files(first, tmp_path / "first")


@pytest.mark.parametrize("variant", ["full bfloat16", "lora bfloat16 with dropout"])
@pytest.mark.parametrize("left_out", ["moments", "masters' low bits"])
def test_a_checkpoint_without_all_of_it_is_another_run(
    tiny_model: Path, tmp_path: Path, variant: str, left_out: str
) -> None:
    first = make(tiny_model, variant)
    train(first, range(3))
    checkpoint = saved(first, tmp_path)
    if left_out == "moments":
        checkpoint.file(OPTIMIZER_FILE).write_bytes(safetensors.torch.save({}))
    else:
        rounded = {
            name: item.bfloat16().float()
            for name, item in safetensors.torch.load_file(checkpoint.file(PARAMETERS_FILE)).items()
        }
        checkpoint.file(PARAMETERS_FILE).write_bytes(safetensors.torch.save(rounded))
    train(first, range(3, 6))
    second = make(tiny_model, variant)
    second.load_state(checkpoint.directory)
    train(second, range(3, 6))
    assert not equal(weights(second), weights(first))


def test_a_checkpoint_of_another_kind_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = saved(make(tiny_model, "full float32"), tmp_path)
    with pytest.raises(errors.FailedPrecondition, match=r"trainer\.lora"):
        make(tiny_model, "lora float32").load_state(checkpoint.directory)


def test_loading_forgets_a_pending_gradient(tiny_model: Path, tmp_path: Path) -> None:
    subject = make(tiny_model, "full float32")
    checkpoint = saved(subject, tmp_path)
    subject.forward_backward(make_groups([[3, 5]], [6]), PPO)
    subject.load_state(checkpoint.directory)
    assert not subject.optim_step(1.0, 0.1).stepped


@pytest.mark.parametrize("how", ["not saved", "not loaded"])
def test_without_the_optimizer_progress_and_masters_stay(tiny_model: Path, tmp_path: Path, how: str) -> None:
    first = make(tiny_model, "full bfloat16")
    train(first, range(3))
    checkpoint = saved(first, tmp_path, optimizer=how != "not saved")
    assert (checkpoint.directory / "optimizer").exists() == (how != "not saved")
    second = make(tiny_model, "full bfloat16")
    second.load_state(checkpoint.directory, optimizer=how != "not loaded")
    assert second.updates == 3 and equal(weights(second), weights(first))
    train(first, range(3, 5))
    train(second, range(3, 5))
    assert second.updates == 5
    assert not equal(weights(second), weights(first)), "moments were loaded after all"


def test_a_save_in_the_background_is_of_the_moment_of_the_call(tiny_model: Path, tmp_path: Path) -> None:
    first, directory = make(tiny_model, "full float32"), tmp_path / "state"
    train(first, range(2))
    wanted = files(first, tmp_path / "now")
    directory.mkdir()
    first.save_state(directory, background=True)
    train(first, range(2, 4))
    first.finish_save()
    found = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert found == wanted


def test_an_error_of_a_save_in_the_background_is_not_lost(tiny_model: Path, tmp_path: Path) -> None:
    subject = make(tiny_model, "full float32")
    (tmp_path / "file").write_text("")
    subject.save_state(tmp_path / "file", background=True)
    with pytest.raises(OSError, match="file"):
        subject.finish_save()
    subject.finish_save()


def test_activation_checkpointing_changes_no_bit(tiny_model: Path) -> None:
    plain = make(tiny_model, "full float32")
    config = TrainerConfig.model_validate({"parallel": {"activation_checkpointing": True}})
    recomputed = TorchBackend(tiny_model, config, 0)
    assert train(plain, range(2)) == train(recomputed, range(2))
    assert equal(weights(plain), weights(recomputed))


def test_a_torn_piece_is_named(tiny_model: Path, tmp_path: Path) -> None:
    subject = make(tiny_model, "full float32")
    checkpoint = saved(subject, tmp_path)
    checkpoint.file(PARAMETERS_FILE).write_bytes(b"\0" * 100)
    with pytest.raises(errors.DataLoss, match="rank-00000"):
        subject.load_state(checkpoint.directory)
