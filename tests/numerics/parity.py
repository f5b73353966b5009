"""One launch of N gloo processes that runs many layouts of the distributed backends, and what each came to.

`reference` runs backend torch in this process; `launch` runs layouts on ranks and returns a Record of each by name. On
rank 0 the training step runs over `Leader`, the others follow: so commands, batching and backends are those of a run.
As a program it is one rank: `python parity.py FOLDER RANK SIZE DEVICE` reads FOLDER/layouts.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from paceline.api.common.v1 import reward_pb2
from paceline.config import make_plugin
from paceline.config.trainer import TrainerConfig
from paceline.samples import COMPLETED, Sample, SampleGroup
from services.trainer.datum import Datum

STEPS = 3
LENGTHS = [1, 2, 3, 50, 5, 5, 5, 9]
REWARDS = [0, 0, 1, 1, 0, 1, 0, 1]
GROUP_SIZE = 2
PROMPT = 4
LAUNCH_SECONDS = 240


@dataclass
class Layout:
    """A backend on ranks, and what is done with it. `fields` are keys of [trainer]."""

    name: str
    model: str
    backend: str
    parallel: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    load: str = ""
    """A state directory to start from."""
    save: str = ""
    """A state directory to write at the end."""
    steps: int = STEPS
    first_step: int = 1

    def config(self) -> TrainerConfig:
        """[trainer] of the layout."""
        base = {"optimizer": {"learning_rate": 1e-3, "eps": 1e-6, "weight_decay": 0.1}, "tokens_per_micro_batch": 64}
        return TrainerConfig.model_validate({**base, "backend": self.backend, "parallel": self.parallel, **self.fields})


@dataclass
class Record:
    """What a layout came to."""

    values: list[dict[str, float]]
    """Of each step, by name: loss, gradient norm and every other metric, but no times."""
    logprobs: list[np.ndarray]
    """float32 [num_tokens] of each sequence under the last weights."""
    weights: dict[str, np.ndarray]
    """By Hugging Face name, after the last step."""
    facts: dict[int, Any] = field(default_factory=dict)
    """What else a layout's probe found, by rank."""


def case_a11(vocabulary: int, step: int) -> list[SampleGroup]:
    """The eight sequences of case A11, with other tokens in every step. Completions have the case's lengths."""
    random = np.random.default_rng([11, step])
    samples = []
    for number, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        count = PROMPT + length
        prompt = np.random.default_rng([11, step, number // GROUP_SIZE]).integers(2, vocabulary, PROMPT)
        ids = np.concatenate([prompt, random.integers(2, vocabulary, length)]).astype(np.int32)
        mask = np.array([0] * PROMPT + [1] * length, np.uint8)
        sampler = (random.normal(-3, 0.3, count) * mask).astype(np.float32)
        samples.append(
            Sample(
                f"s{number}", f"t{number}", ids, mask, sampler, [(1, length)], COMPLETED, 0.9,
                reward=reward_pb2.Reward(value=reward),
            )
        )  # fmt: skip
    return [
        SampleGroup("parity", f"e0.{index}", 1, samples[index * GROUP_SIZE : (index + 1) * GROUP_SIZE])
        for index in range(len(samples) // GROUP_SIZE)
    ]


def reference(layout: Layout) -> Record:
    """The same with one process of backend torch. Layout.backend and .parallel are not used."""
    from services.trainer.backends.torch import TorchBackend

    plain = dataclasses.replace(layout, backend="torch", parallel={})
    backend = TorchBackend(Path(layout.model), plain.config(), 0)
    return _train(backend, plain)


def launch(
    folder: Path, ranks: int, layouts: Sequence[Layout], environment: Mapping[str, str] = os.environ,
    device: str = "cpu",
) -> dict:  # fmt: skip
    """Run all layouts, one after another, in one group of processes. AssertionError shows what a rank said."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layouts.json").write_text(json.dumps([dataclasses.asdict(item) for item in layouts]))
    paths = [str(Path(__file__).parent), *sys.path]
    env = {
        **environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, __file__, str(folder), str(rank), str(ranks), device]
        with log.open("wb") as output:
            processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
    try:
        codes = [process.wait(LAUNCH_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = "\n".join(f"--- rank {rank}\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs))
    assert codes == [0] * ranks, f"exit codes {codes}\n{told}"
    return {item.name: _read(folder / item.name, ranks) for item in layouts}


def difference(one: Record, other: Record) -> dict[str, float]:
    """The largest differences: of values and of weights, each relative to the larger of 1 and the value."""
    assert [sorted(item) for item in one.values] == [sorted(item) for item in other.values]
    assert one.weights.keys() == other.weights.keys()
    found = {
        name: max(_gap(a[name], b[name]) for a, b in zip(one.values, other.values, strict=True))
        for name in one.values[0]
    }
    found["weights"] = max(_gap(one.weights[name], other.weights[name]) for name in one.weights)
    found["logprobs"] = max(_gap(a, b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
    return found


def _gap(one: Any, other: Any) -> float:
    left, right = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert left.shape == right.shape
    return float((np.abs(left - right) / np.maximum(1.0, np.abs(right))).max(initial=0.0))


def attach_routing(groups: Sequence[SampleGroup], model: str) -> None:
    """Experts drawn at random, of which siblings have the same for what they share."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(model)
    layers, experts, top_k = config.num_hidden_layers, config.num_experts, config.num_experts_per_tok
    for number, group in enumerate(groups):
        for sample in group.samples:
            scores = np.random.default_rng(number).random((len(sample.token_ids) - 1, layers, experts))
            sample.attached["routing"] = scores.argsort(-1)[..., :top_k].astype(np.uint8)


def groups_of_a11(vocabulary: int, routed: str = "") -> list[list[Datum]]:
    """The case's sequences of step 1 as datums, without advantages; with a routing for the model `routed`."""
    groups = case_a11(vocabulary, 1)
    if routed:
        attach_routing(groups, routed)
    return [
        [
            Datum(
                item.token_ids, item.loss_mask.astype(np.float32), zeros, zeros, item.temperature,
                routing=item.attached.get("routing"),
            )
            for item in group.samples
            for zeros in [np.zeros(len(item.token_ids), np.float32)]
        ]
        for group in groups
    ]  # fmt: skip


def _train(backend: Any, layout: Layout) -> Record:
    """Train the case's steps, on rank 0 or alone."""
    from services.trainer.objective import Objective
    from services.trainer.step.step_trainer import StepTrainer

    config = layout.config()
    if layout.load:
        backend.load_state(Path(layout.load))
    estimator = make_plugin("estimator", config.estimator, "trainer.estimator")
    trainer = StepTrainer(backend, estimator, Objective.from_config(config), config, 10)
    values = []
    for step in range(layout.first_step, layout.first_step + layout.steps):
        groups = case_a11(backend.vocabulary, step)
        if config.routing_replay:
            attach_routing(groups, layout.model)
        found = trainer.train(step, groups).values
        values.append({name: value for name, value in found.items() if "second" not in name})
    if layout.save:
        Path(layout.save).mkdir(parents=True)
        backend.save_state(Path(layout.save))
    data = groups_of_a11(backend.vocabulary, layout.model if config.routing_replay else "")
    logprobs = [item for group in backend.forward(data) for item in group]
    weights = {name: item.float().cpu().numpy() for name, item in backend.weights().items()}
    return Record(values, logprobs, weights)


PROBES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {}
"""What a layout named so does besides, on every rank, after training: (backend, world) -> JSON facts."""


def _write(folder: Path, record: Record) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "values.json").write_text(json.dumps(record.values))
    logprobs = {str(number): item for number, item in enumerate(record.logprobs)}
    safetensors.numpy.save_file(logprobs, folder / "logprobs.safetensors")
    safetensors.numpy.save_file(record.weights, folder / "weights.safetensors")


def _read(folder: Path, ranks: int) -> Record:
    logprobs = safetensors.numpy.load_file(folder / "logprobs.safetensors")
    facts = {rank: folder / f"facts-{rank}.json" for rank in range(ranks)}
    return Record(
        json.loads((folder / "values.json").read_text()), [logprobs[str(number)] for number in range(len(logprobs))],
        dict(safetensors.numpy.load_file(folder / "weights.safetensors")),
        {rank: json.loads(path.read_text()) for rank, path in facts.items() if path.is_file()},
    )  # fmt: skip


def _run_rank(folder: Path, rank: int, size: int, device: str) -> None:
    """Every layout on this rank."""
    import torch
    import torch.distributed as dist

    from paceline.plugins import registry
    from services.trainer.ranks.follower import follow
    from services.trainer.ranks.leader import Leader
    from services.trainer.ranks.world import World

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    world = World.join(rank, size, rank, device, store)
    for entry in json.loads((folder / "layouts.json").read_text()):
        layout = Layout(**entry)
        config = layout.config()
        backend = registry("train_backend").load(layout.backend)(Path(layout.model), config, 0, world)
        if rank == 0:
            leader = Leader(backend, world)
            record = _train(leader, layout)
            leader.stop()
            _write(folder / layout.name, record)
        else:
            follow(backend, world)
        world.barrier()
        close = getattr(backend, "close", None)
        if layout.name in PROBES:
            facts = PROBES[layout.name](backend, world)
            (folder / layout.name / f"facts-{rank}.json").write_text(json.dumps(facts))
        if close is not None:
            close()
    world.barrier()
    dist.destroy_process_group()


def _main() -> int:
    # Registers probes in the module that is imported as `parity`, which this program is not.
    import parity_probes

    PROBES.update(parity_probes.PROBES)
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = _main()
    except Exception:  # noqa: BLE001  the others of the group wait: end at once, with the reason in the log
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
