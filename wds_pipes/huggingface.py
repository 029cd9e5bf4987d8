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
from functools import partial
from pathlib import Path
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
_DATA = "data"  # where a checkpoint of the Trainer has the position of the data
_LAST = "trainer_state.json"  # which the Trainer writes last


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a Trainer in its ``output_dir``; None: there is
    none.
    """
    complete = [str(path.parent) for path in Path(directory).glob(f"checkpoint-[0-9]*/{_LAST}")]
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
        ValueError: on several ranks, a loader may yield other numbers of batches on each; or
            ``batch_eval_metrics`` is set, which needs a loader of Accelerate.
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

    def _get_dataloader(
        self, dataset: Any, description: str, *options: Any, is_training: bool = False, **others: Any
    ) -> DataLoader[Any]:
        loader, kind = _check(dataset), _TrainBatches if is_training else _EvalBatches
        even = ("drop", "pad", "loop") if is_training else ("drop", "pad")
        if loader.rank.of > 1 and progress_of(loader).plan.mode not in even:
            raise ValueError(
                f"{description} on several ranks needs as many batches on each, or ranks would wait for others for "
                f"ever: pass PipeLoader(epoch_end={even[-1]!r})"
            )
        return _Loader(kind(loader, self), batch_size=None, collate_fn=lambda batch: batch)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        loader: PipeLoader = dataloader.dataset.loader  # type: ignore[attr-defined]
        return len(loader) * progress_of(loader).plan.batch_size * loader.rank.of

    def known_fields(self, batch: Any, *others: str) -> Any:
        """Return a batch without the fields that neither the model takes nor ``others`` names."""
        self._set_signature_columns_if_needed()
        kept = {*(self._signature_columns or ()), *others}
        unused = self.args.remove_unused_columns
        return {name: value for name, value in batch.items() if name in kept} if unused else batch

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train, and continue from a checkpoint: a path, or True for the newest complete one."""
        path, directory = resume_from_checkpoint, str(self.args.output_dir)
        if path is True and (path := newest_checkpoint(directory)) is None:
            raise ValueError(f"there is no complete checkpoint in {directory}")
        if path and checkpoint.load(os.path.join(path, _DATA), _check(self.train_dataset)) is None:
            raise StateError(
                f"{path} holds no position of the data of all ranks: continue from another checkpoint of a PipeTrainer."
            )
        return super().train(path, *args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # rule 1
        path = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        (path / _LAST).unlink(missing_ok=True)  # another run's, whose checkpoint is replaced now
        checkpoint.save(path / _DATA, _check(self.train_dataset), step=self.state.global_step)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

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
            found = [
                None if value is None else recursively_apply(lambda t: t[rows] if t.ndim else t, value)
                for value in found
            ]
        real = self.accelerator.gather(real.to(self.args.device)).view(-1, size)
        self.gather_function = partial(self._gather_real, real)
        return None if loss is None else loss.expand(size), *found

    def _gather_real(self, real: torch.Tensor, values: Any) -> Any:
        """Return values of all ranks without the padding: none, one or several for each sample.

        ``real`` says which samples are none: (ranks, samples).
        """

        def without_padding(values: torch.Tensor) -> torch.Tensor:
            times = len(values) // real.numel() if values.ndim else 0
            return values[real[:, None].expand(-1, times, -1).reshape(-1)] if times else values

        return recursively_apply(without_padding, self.accelerator.gather(values))


class _Batches(IterableDataset[Any]):
    """The batches of a PipeLoader as a dataset."""

    def __init__(self, loader: PipeLoader, trainer: PipeTrainer) -> None:
        self.loader, self.trainer = loader, trainer


class _TrainBatches(_Batches):
    left: bool | None = None  # whether an epoch was begun whose end was not seen; None: no epoch was begun

    def __iter__(self) -> Iterator[Any]:
        progress, left = progress_of(self.loader), self.left
        self.left = True
        if left is None:
            yield from itertools.repeat(None, self._skipped())  # rule 2
        elif left and not progress.is_over(progress.at):
            progress.go_to(progress.position)  # rule 3
        for batch in self.loader:
            yield self.trainer.known_fields(batch)
        self.left = False

    def _skipped(self) -> int:
        """Return how many batches the Trainer skips in its first epoch."""
        arguments, step = self.trainer.args, self.trainer.state.global_step
        accumulated = arguments.gradient_accumulation_steps
        unknown = progress_of(self.loader).length_unknown is not None
        steps = arguments.max_steps if unknown else max(math.ceil(len(self.loader) / accumulated), 1)
        return 0 if arguments.ignore_data_skip else step % steps * accumulated


class _EvalBatches(_Batches):
    def __iter__(self) -> Iterator[Any]:
        progress_of(self.loader).begin_again()
        for batch in self.loader:
            yield self.trainer.known_fields(batch, _PADDING)


class _Loader(DataLoader[Any]):
    """What the Trainer needs to skip batches: a DataLoader, with the length of the PipeLoader."""

    def __len__(self) -> int:
        return len(self.dataset.loader)  # type: ignore[attr-defined]


def _at(values: Any, places: list[int], size: int) -> Any:
    """Return the values of the samples at these places of a batch."""
    if not hasattr(values, "__len__") or len(values) != size:
        return values
    return [values[place] for place in places] if isinstance(values, (list, tuple)) else values[places]


def _check(loader: Any) -> PipeLoader:
    if not isinstance(loader, PipeLoader):
        raise TypeError(f"pass PipeLoaders to PipeTrainer as train_dataset= and eval_dataset=, not {loader!r:.80}")
    return loader
