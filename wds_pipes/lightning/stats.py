"""StatsCallback: measurements of reading, as metrics of the Trainer."""

from __future__ import annotations

from typing import Any

from wds_pipes.core.counts import logger
from wds_pipes.lightning.resumable import pl
from wds_pipes.loader.stats import describe_stats


class StatsCallback(pl.Callback):
    """Logs ``loader.stats()`` of the training data to the Trainer's loggers.

    It shows how fast the data are read, and how long training waits for them.

    Args:
        every_n_steps: how often, in training steps; None: as often as the Trainer logs.
        prefix: what stands before the name of each metric.
        all_ranks: also log a line with the logger ``wds_pipes`` (level INFO), on rank 0: which rank
            waits most for data, and for what. This takes one collective operation each time.
    """

    def __init__(self, every_n_steps: int | None = None, prefix: str = "data/", *, all_ranks: bool = False) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, not {every_n_steps}")
        self._every = every_n_steps
        self._prefix, self._all_ranks = prefix, all_ranks
        self._logged = -1  # the last step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every, step = self._every or trainer.log_every_n_steps, trainer.global_step
        if every and step % every == 0 and step != self._logged:  # a step may take several batches
            self._logged = step
            loaders = getattr(trainer.datamodule, "_loaders", {})
            for name, loader in loaders.items():
                prefix = self._prefix if len(loaders) == 1 else f"{self._prefix}{name}/"
                stats = {f"{prefix}{key}": value for key, value in loader.loader.stats().items()}
                for metrics in trainer.loggers:
                    metrics.log_metrics(stats, step=step)
                if self._all_ranks:
                    ranks = loader.loader.stats_of_ranks()
                    if trainer.is_global_zero:
                        logger.info("%s, step %d: %s", name, step, describe_stats(ranks))
