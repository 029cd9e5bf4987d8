"""Lightning: training data that resumes exactly, from the middle of an epoch and on any number of devices.

    data = WdsDataModule(train="data/train-{000000..000999}.tar", fields=["jpg;png", "cls"], batch_size=64, num_workers=4)
    trainer.fit(model, data, ckpt_path="last")

Works with ``lightning`` and with ``pytorch_lightning``: with the one that is imported when this module is, else with the one that is installed. Where a program
imports both and its Trainer is that of ``pytorch_lightning``, write a ``class Data(ResumableData, pytorch_lightning.LightningDataModule)``.

Rules:
1. The DataModule has the state, for all ranks. Lightning would keep that of the loader of rank 0 alone, give it to every rank, and drop it where
   ``estimated_stepping_batches`` is used.
2. What counts are batches that were trained on. Lightning fetches one ahead where the length is not known, and then the loader is ahead of the model.
3. Lightning calls ``iter()`` more often than there are epochs, and may throw away what it fetched. A pass of which nothing came to the model is repeated.
4. An epoch that is resumed on another number of devices has another length than those behind it, so Lightning is made to ask for it again.
5. From a checkpoint at the end of an epoch Lightning may go on in that epoch, of which there is no batch left.
"""

from wds_pipes.lightning.data_module import WdsDataModule
from wds_pipes.lightning.resumable import ResumableData
from wds_pipes.lightning.stats import StatsCallback

__all__ = ["ResumableData", "StatsCallback", "WdsDataModule"]
