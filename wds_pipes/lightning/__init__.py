"""Lightning: training data that resumes exactly, in the middle of an epoch and on any number of
devices.

    data = WdsDataModule("data/train-{000..999}.tar", fields=["jpg;png", "cls"], batch_size=64)
    trainer.fit(model, data, ckpt_path="last")

It works with ``lightning`` and with ``pytorch_lightning``: with the one that is already imported
when this module is imported, else with the one that is installed. If a program imports both and its
Trainer is from ``pytorch_lightning``, write your own class, as
``class Data(ResumableData, pytorch_lightning.LightningDataModule)``.

Rules:
1. The DataModule holds the state, for all ranks. Lightning would save only the state of rank 0's
   loader, load it on every rank, and drop it if ``estimated_stepping_batches`` is used.
2. A batch counts when the model was trained on it. If the length is not known, Lightning fetches
   one batch ahead, so the loader is ahead of the model.
3. Lightning calls ``iter()`` more often than once per epoch, and may drop what it fetched. An
   iteration of which the model got no batch is repeated.
4. An epoch that is resumed on another number of devices has another length than the epochs after
   it. So Lightning is made to ask for the length again.
5. From a checkpoint at the end of an epoch, Lightning may continue in that epoch, which has no
   batches left.
6. Several training loaders end together, with the shortest one (min_size). In its other modes,
   Lightning would have to know at a resume which of them have ended, and its checkpoints do not say
   it.
"""

# ``data_module``: WdsDataModule; ``resumable``: ResumableData, its base, and a PipeLoader as the
# Trainer sees it, and which package of Lightning is used; ``stats``: StatsCallback.

from wds_pipes.lightning.data_module import WdsDataModule
from wds_pipes.lightning.resumable import ResumableData
from wds_pipes.lightning.stats import StatsCallback

__all__ = ["ResumableData", "StatsCallback", "WdsDataModule"]
