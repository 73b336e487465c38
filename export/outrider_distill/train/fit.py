"""Training of one head: AdamW with warm-up and cosine decay over so many steps, and acceptance on held-out text.

    head, config = start_head(teacher, data)
    report = fit(head, data, num_steps=4000, checkpoint=Path("work/checkpoint.pt"))
    save(head, config, folder, report)

What is trained depends on the data, the number of steps, the seed and the number of threads, and not on the clock: a
training that was killed and goes on from its checkpoint ends in the same weights. With several threads that holds as
far as PyTorch's own sums do.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ExportError
from outrider_distill.data import Data
from outrider_distill.train.checkpoint import read_checkpoint, write_checkpoint
from outrider_distill.train.files import build, new_config
from outrider_distill.train.layers import Teacher
from outrider_distill.train.places import Accuracy, Reach
from outrider_distill.train.status import Evaluation, TrainingStatus, Watch

DRAFT_VOCAB_SIZE = 8192
TOKENS_IN_USUAL_BATCH = 2048
# On a GPU, whose kernels are too short otherwise, batches are up to eight times as large: once for so many bytes.
MOST_BATCHES, GPU_MEMORY = 8, 8_000_000_000
TOKENS_IN_BATCH = {"draft": 1024}
LEARNING_RATE = {"draft": 4e-5}  # others: 1e-3
FURTHER_RATE = {"eagle3": 4e-4, "draft": 1e-5}  # of what was trained before, and is whole
WARM_UP, _LEAST_WARM_UP, _MOST_WARM_UP = 0.04, 10, 0.3  # of the steps; steps at least; of the steps at most
CLIP = 1.0
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly between 0 and 1
HELD_OUT_TOKENS = {"draft": 3000}  # others: 10,000; it takes longest
NUM_EVALUATIONS = 25  # at most
PATIENCE = 8  # evaluations without more tokens a round, before training ends early
_LEAST_GAIN = 0.002  # tokens a round; less is noise
_SAVE_EVERY = 180.0  # seconds
# Variables that say how many kernels PyTorch's oneDNN, and PyTorch around it, keep with their buffers: by default 1,024
# each, one for every shape. Nearly every batch has new shapes, so that these would take gigabytes and save nothing.
_KERNEL_CACHES, _KEPT_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "8"


class Stopped(BaseException):  # as KeyboardInterrupt: no handler of errors is to catch it
    """The caller has asked to stop, and the checkpoint is written."""


def start_head(teacher: Teacher, data: Data, *, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A new head with its starting weights, and its config.json."""
    draft_vocab_size = min(DRAFT_VOCAB_SIZE, teacher.num_tokens)
    config = new_config(teacher.shape, draft_vocab_size=draft_vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build(config, teacher.embedding.float())
        head.start(teacher, torch.from_numpy(data.frequent_tokens(draft_vocab_size, teacher.num_tokens)))
    return head, config


def fit(
    head: Any,
    data: Data,
    *,
    num_steps: int,
    seed: int = 0,
    share: float = 1.0,
    learning_rate: float | None = None,
    is_trained: bool = False,
    checkpoint: Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train `head` for `num_steps` batches, or until more does not help. Returns what training.json says of it.

    The head gets the weights of the best evaluation. share: of the training data. is_trained: the head was trained
    before; it is evaluated first, so that it does not become worse. checkpoint: the file to go on from, if it is there;
    written every few minutes, at every evaluation, and when `stopped` says so.

    Raises:
        Stopped: when `stopped` was true after a step.
        ExportError: for a checkpoint of another training, data without a batch, or a loss that is no number.
    """
    watch = watch or Watch()
    training = Training(head, data, num_steps, seed, share, learning_rate)
    if checkpoint is not None and (found := read_checkpoint(checkpoint)) is not None:
        training.load_state_dict(found)
    # An evaluation takes as long as some batches, so a short training has fewer of them.
    every = max(num_steps // NUM_EVALUATIONS, len(held_out(head.kind, data)))
    began, saved = time.monotonic() - training.seconds, time.monotonic()
    if is_trained and not training.evaluations:
        training.evaluate()
        watch.evaluated(training.status)
    while training.step < num_steps and not training.has_converged:
        training.train_batch()
        training.seconds = time.monotonic() - began
        watch.stepped(training.status)
        is_due = training.step % every == 0 or training.step == num_steps
        if is_due:
            training.evaluate()
            watch.evaluated(training.status)
        stops = stopped()
        if checkpoint is not None and (is_due or stops or time.monotonic() - saved > _SAVE_EVERY):
            training.seconds = time.monotonic() - began
            write_checkpoint(checkpoint, training.state_dict())
            saved = time.monotonic()
        if stops:
            raise Stopped(f"The same command continues after step {training.step:,} of {num_steps:,}.")
    return training.finish()


class Training:
    """A head in training: all that a checkpoint has to remember, and one step of it."""

    def __init__(
        self, head: Any, data: Data, num_steps: int, seed: int, share: float, learning_rate: float | None
    ) -> None:
        for name in _KERNEL_CACHES:
            os.environ.setdefault(name, _KEPT_KERNELS)  # it is read when the first kernel is made
        self.device, self._autocast = find_device()
        self.head, self.data = head.to(self.device), data
        self.num_steps, self.seed, self.share = num_steps, seed, share
        self.rate = learning_rate or LEARNING_RATE.get(head.kind, 1e-3)
        self._optimizer = torch.optim.AdamW(_groups(head), lr=self.rate, betas=(0.9, 0.95), fused=True)
        self.reach = Reach(head.num_places)
        self.step, self.epoch, self._place = 0, 0, 0
        self.num_tokens, self.loss, self.seconds = 0, 0.0, 0.0
        self.evaluations: list[Evaluation] = []
        self._best: dict[str, Any] = {}
        self._batches: list[list[int]] = []

    @property
    def status(self) -> TrainingStatus:
        """Where the training is."""
        return TrainingStatus(
            self.head.kind, self.step, self.num_steps, self.epoch, self.num_tokens, self.loss, self.seconds,
            list(self.evaluations),
        )  # fmt: skip

    @property
    def best(self) -> Evaluation:
        """The evaluation whose weights are kept: the first that no later one beats by more than noise."""
        best = self.evaluations[0]
        for each in self.evaluations[1:]:
            if each.tokens_per_round > best.tokens_per_round + _LEAST_GAIN:
                best = each
        return best

    @property
    def has_converged(self) -> bool:
        """Whether the latest evaluations have brought no more tokens a round.

        Not before the start was beaten: at the full rate a head that was trained before first becomes worse.
        """
        if not self.evaluations or (best := self.best).step == 0:
            return False
        return self.evaluations.index(best) < len(self.evaluations) - PATIENCE

    def train_batch(self) -> None:
        """One step."""
        batch = self.data.read(self._next_batch()).to(self.device)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * schedule(self.step, self.num_steps)
        self.head.train()
        with self._autocast():
            loss = self.head.loss(batch, self.reach, self.step * _GOLDEN % 1)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ExportError(
                f"Training {self.head.kind} has come to a loss of {value} at step {self.step}. Begin again with a "
                f"lower learning rate than {self.rate:g}."
            )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self._optimizer.step()
        self.step += 1
        self.num_tokens += int(batch.answer.sum())
        self.loss += (value - self.loss) * max(0.05, 1 / self.step)

    def evaluate(self) -> None:
        """Measure acceptance on held-out text, and keep the weights if they are the best so far."""
        with self._autocast():
            accuracy = evaluate(self.head, self.data)
        self.evaluations.append(
            Evaluation(self.step, self.num_tokens, round(self.loss, 4), accuracy.by_place(), accuracy.mean_length())
        )
        if self.best is self.evaluations[-1]:
            self._best = {name: weights.clone() for name, weights in self._weights.items()}

    def finish(self) -> dict[str, Any]:
        """Give the head its best weights, on the CPU. Returns what training.json says."""
        if self._best:
            self.head.load_state_dict(self._best, strict=False)
        self.head.to("cpu").eval()
        best = self.best
        return {
            "kind": self.head.kind,
            "data_tokens": self.data.num_tokens,
            "data_answer_tokens": self.data.num_answer_tokens,
            "share_of_data": self.share,
            "trained_answer_tokens": self.num_tokens,
            "steps": self.step,
            "planned_steps": self.num_steps,
            "epochs": self.epoch,
            "hours": round(self.seconds / 3600, 3),
            "learning_rate": self.rate,
            "seed": self.seed,
            "final_loss": round(self.loss, 4),
            "held_out_acceptance_by_place": best.acceptance,
            "held_out_tokens_per_round": best.tokens_per_round,
            "curve": [vars(each) for each in self.evaluations],
        }

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, and what is told of those before."""
        return {
            "of": self._identity,
            "weights": self._weights,
            "optimizer": self._optimizer.state_dict(),
            "reach": self.reach.acceptance,
            "counts": [self.step, self.epoch, self._place, self.num_tokens],
            "means": [self.loss, self.seconds],
            "evaluations": [vars(each) for each in self.evaluations],
            "best": self._best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ExportError: when it is of another training.
        """
        if state["of"] != self._identity:
            raise ExportError(
                f"The checkpoint is of another training ({state['of']}; this one is {self._identity}). Delete it to "
                "begin again."
            )
        self.head.load_state_dict(state["weights"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
        self.reach.acceptance = state["reach"]
        self.step, self.epoch, self._place, self.num_tokens = state["counts"]
        self.loss, self.seconds = state["means"]
        self.evaluations = [Evaluation(**each) for each in state["evaluations"]]
        self._best = state["best"]
        self._batches = self._epoch_batches() if self._place else []

    @property
    def _weights(self) -> dict[str, Any]:
        """The weights that are trained; all others are what they were at the start."""
        return {name: each.detach() for name, each in self.head.named_parameters() if each.requires_grad}

    @property
    def _identity(self) -> str:
        what = f"{self.num_steps} steps, seed {self.seed}, rate {self.rate:g}, share {self.share:g}"
        return f"{self.head.kind}, {self.data.num_tokens} tokens, {what}"

    def _next_batch(self) -> list[int]:
        if self._place == len(self._batches):
            # `epoch` counts those begun.
            self.epoch, self._place = self.epoch + 1, 0
            self._batches = self._epoch_batches()
        self._place += 1
        return self._batches[self._place - 1]

    def _epoch_batches(self) -> list[list[int]]:
        found = _batches(self.head.kind, self.data, self.seed + self.epoch, self.share)
        if not found:
            raise ExportError(f"A share of {self.share:g} of the data has no conversation to train on. Make more data.")
        return found


def num_batches(kind: str, data: Data, share: float = 1.0) -> int:
    """Steps of an epoch."""
    return max(len(_batches(kind, data, 0, share)), 1)


def _batches(kind: str, data: Data, seed: int, share: float) -> list[list[int]]:
    return data.batches(_tokens_in_batch(kind), seed, share)


def _tokens_in_batch(kind: str) -> int:
    usual = TOKENS_IN_BATCH.get(kind, TOKENS_IN_USUAL_BATCH)
    if not torch.cuda.is_available():
        return usual
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return usual * min(max(memory // GPU_MEMORY, 1), MOST_BATCHES)


def evaluate(head: Any, data: Data) -> Accuracy:
    """Greedy drafts on held-out greedy answers: how often each place is right, given that those before it are."""
    head.eval()
    accuracy, device = Accuracy(), next(head.parameters()).device
    for conversations in held_out(head.kind, data):
        with torch.no_grad():
            accuracy.add(*head.hits(data.read(conversations).to(device)))
    return accuracy


def held_out(kind: str, data: Data) -> list[list[int]]:
    """The batches of an evaluation."""
    return data.held_out(_tokens_in_batch(kind), HELD_OUT_TOKENS.get(kind, 10000))


def find_device() -> tuple[Any, Callable[[], Any]]:
    """Where training runs, and a function that makes a context for its passes: half precision where it is faster."""
    if torch.cuda.is_available():
        device, has_half = torch.device("cuda"), torch.cuda.is_bf16_supported()
    else:
        known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        device, has_half = torch.device("cpu"), any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return device, lambda: torch.autocast(device.type, torch.bfloat16, enabled=bool(has_half))


def schedule(step: int, num_steps: int) -> float:
    """The rate's factor in a step: linear warm-up, then a cosine down to 0.05."""
    done, warm_up = step / num_steps, min(max(WARM_UP, _LEAST_WARM_UP / num_steps), _MOST_WARM_UP)
    if done < warm_up:
        return 0.05 + 0.95 * done / warm_up
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


def _groups(head: Any) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    parameters = [each for each in head.parameters() if each.requires_grad]
    matrices = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
