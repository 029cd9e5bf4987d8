"""PipeTrainer: the Trainer of Hugging Face's transformers over PipeLoaders, which resumes exactly.

    trainer = PipeTrainer(model, arguments, train_dataset=loader, eval_dataset=eval_loader)
    trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.output_dir))

Rules:
1. The position of the data is saved with the model, by all ranks, and before the model: a
   checkpoint with ``trainer_state.json``, which the Trainer writes last, is complete.
2. The Trainer resumes within an epoch by skipping batches, and counts them for the steps of the
   optimizer and the end of the epoch. It gets as many empty places to skip, and then what the
   loader has left.
3. The Trainer may leave an epoch before its end. The next one continues there, so no sample is
   lost.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

try:
    from accelerate.utils import find_batch_size, recursively_apply
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"wds_pipes.huggingface needs the Trainer of transformers ({error}): pip install 'wds_pipes[transformers]'",
        name=error.name,
    ) from None

from wds_pipes import checkpoint
from wds_pipes.errors import StateError
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of

__all__ = ["PipeTrainer", "newest_checkpoint"]

_PADDING = "__padding__"


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a Trainer in its ``output_dir``; None: there is
    none.
    """
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [os.path.join(directory, name) for name in names if name.startswith("checkpoint-")]
    complete = [path for path in found if os.path.exists(os.path.join(path, "trainer_state.json"))]
    return max(complete, key=lambda path: int(path.rpartition("-")[2]), default=None)


class PipeTrainer(Trainer):
    """A Trainer whose datasets are PipeLoaders, and which resumes them exactly, with the model.

    All arguments are those of ``transformers.Trainer``. The loader makes the batches: the sizes of
    batches, workers and collating of ``TrainingArguments`` do not apply. A batch is a dict. Fields
    that the model does not take are removed, unless ``remove_unused_columns=False``.

    If the number of batches is not known, pass ``max_steps``. Each rank has a PipeLoader of its
    own, which divides the data; a resume on another number of ranks continues with what is left of
    the epoch.

    For evaluation, each pass yields the same samples. On several ranks, pass
    ``PipeLoader(..., epoch_end="pad")``: the repeated samples, which have ``"__padding__"``, are in
    no metric, prediction or loss. The loss is the mean over samples, if the model's loss is the
    mean over a batch.

    Args:
        train_dataset: the PipeLoader to train on.
        eval_dataset: a PipeLoader, or a dict of them by name.

    Raises:
        TypeError: a dataset is no PipeLoader.
        ValueError: on several ranks, a loader for evaluation may yield other numbers of batches on
            each of them; or ``batch_eval_metrics`` is set, which needs a loader of Accelerate.
        StateError: the checkpoint has no position of the data, or one that does not fit them.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        loaders = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for loader in (train_dataset, *loaders):
            if loader is not None:
                _check(loader)
        if train_dataset is not None and any(loader is train_dataset for loader in loaders):
            raise ValueError("evaluation needs a PipeLoader of its own: that of the training keeps its position")
        super().__init__(model, args, train_dataset=train_dataset, eval_dataset=eval_dataset, **options)
        if self.args.batch_eval_metrics:
            raise ValueError("PipeTrainer computes metrics over all batches: pass batch_eval_metrics=False")
        self._real = torch.ones(0, dtype=torch.bool)  # of the last evaluated batch: (ranks, samples)
        self._evaluated = 0  # samples of all ranks in this evaluation

    def get_train_dataloader(self) -> DataLoader[Any]:
        return _loader_of(_TrainBatches(_check(self.train_dataset), self))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        loaders: Any = self.eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = loaders[eval_dataset]
        return self.get_test_dataloader(loaders if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        loader = _check(test_dataset)
        if loader.rank.of > 1 and progress_of(loader).plan.mode in ("exact", "loop"):
            raise ValueError(
                "to evaluate on several ranks, all need the same number of batches: pass PipeLoader(epoch_end='pad')"
            )
        return _loader_of(_EvalBatches(loader, self))

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        loader: PipeLoader = dataloader.dataset.loader  # type: ignore[attr-defined]
        return len(loader) * progress_of(loader).plan.batch_size * loader.rank.of

    def known_fields(self, batch: Any, *others: str) -> Any:
        """Return a batch without the fields that neither the model takes nor ``others`` names."""
        if not self.args.remove_unused_columns:
            return batch
        self._set_signature_columns_if_needed()
        kept = {*(self._signature_columns or ()), *others}
        return {name: value for name, value in batch.items() if name in kept}

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train, and continue from a checkpoint: a path, or True for the newest complete one."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(str(self.args.output_dir))
            if resume_from_checkpoint is None:
                raise ValueError(f"there is no complete checkpoint in {self.args.output_dir}")
        if resume_from_checkpoint:
            folder = _data_in(str(resume_from_checkpoint))
            if not os.path.isdir(folder) or checkpoint.load(folder, _check(self.train_dataset)) is None:
                raise StateError(
                    f"{resume_from_checkpoint} holds no position of the data of all ranks: continue from another "
                    "checkpoint of a PipeTrainer."
                )
        return super().train(resume_from_checkpoint, *args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # rule 1
        step = self.state.global_step
        path = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{step}")
        checkpoint.save(_data_in(path), _check(self.train_dataset), step=step)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        self._evaluated = 0
        return super().evaluation_loop(*args, **options)._replace(num_samples=self._evaluated)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Compute loss and logits of the samples that are no padding, each in its place."""
        padding = inputs.pop(_PADDING, None)
        size = find_batch_size(inputs) if padding is None else len(padding)
        real = torch.ones(size, dtype=torch.bool) if padding is None else ~torch.as_tensor(padding).cpu()
        some = 0 < int(real.sum()) < size
        if some:
            places = real.nonzero()[:, 0].tolist()
            inputs = {name: _at(value, places, size) for name, value in inputs.items()}
        loss, *found = super().prediction_step(model, inputs, *args, **options)
        if some:
            rows = (real.cumsum(0) - 1).clamp(min=0).tolist()  # any for padding, which is dropped
            found = [None if value is None else recursively_apply(lambda t: t[rows], value) for value in found]
        gathered = self.accelerator.gather(real.to(self.args.device)).view(-1, size)
        self._real, self.gather_function = gathered, self._gather_real
        self._evaluated += int(gathered.sum())
        return None if loss is None else loss.expand(size), *found

    def _gather_real(self, values: Any) -> Any:
        """Return values of all ranks, one or several for each sample, without the padding."""

        def real(values: torch.Tensor) -> torch.Tensor:
            times = len(values) // self._real.numel()
            return values[self._real[:, None].expand(-1, times, -1).reshape(-1)]

        return recursively_apply(real, self.accelerator.gather(values))


class _Batches(IterableDataset[Any]):
    """The batches of a PipeLoader as a dataset. The Trainer skips only those of a DataLoader."""

    def __init__(self, loader: PipeLoader, trainer: PipeTrainer) -> None:
        super().__init__()
        self.loader, self.trainer = loader, trainer

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # also if len() is not known


class _TrainBatches(_Batches):
    begun = False  # the Trainer's first epoch was
    left = False  # an epoch was begun, whose end was not seen

    def __iter__(self) -> Iterator[Any]:
        progress = progress_of(self.loader)
        if self.left and not progress.is_over(progress.at):
            progress.go_to(progress.position)  # rule 3
        self.left = True
        if not self.begun:
            self.begun = True
            yield from itertools.repeat(None, self._skipped())  # rule 2
        for batch in self.loader:
            yield self.trainer.known_fields(batch)
        self.left = False

    def _skipped(self) -> int:
        """Return how many batches the Trainer skips in its first epoch."""
        arguments, step = self.trainer.args, self.trainer.state.global_step
        accumulated = arguments.gradient_accumulation_steps
        if arguments.ignore_data_skip:
            return 0
        unknown = progress_of(self.loader).length_unknown is not None
        steps = arguments.max_steps if unknown else max(math.ceil(len(self) / accumulated), 1)
        return step % steps * accumulated


class _EvalBatches(_Batches):
    def __iter__(self) -> Iterator[Any]:
        progress = progress_of(self.loader)
        progress.go_to(progress.plan.beginning(0))  # set_epoch() would leave the place where with_epoch() has cut
        for batch in self.loader:
            yield self.trainer.known_fields(batch, _PADDING)


def _loader_of(batches: _Batches) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def _at(values: Any, places: list[int], size: int) -> Any:
    """Return the values of the samples at these places of a batch."""
    if not hasattr(values, "__len__") or len(values) != size:
        return values
    return [values[place] for place in places] if isinstance(values, (list, tuple)) else values[places]


def _check(loader: Any) -> PipeLoader:
    if not isinstance(loader, PipeLoader):
        raise TypeError(f"pass PipeLoaders to PipeTrainer as train_dataset= and eval_dataset=, not {loader!r:.80}")
    return loader


def _data_in(path: str) -> str:
    """Return where the position of the data is in a checkpoint of the Trainer."""
    return os.path.join(path, "data")
