"""Waits of DataLoader that tests need not wait for."""

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


@pytest.fixture
def impatient(monkeypatch):
    """DataLoader waits a tenth of a second, not five, for results before it looks whether its
    workers live, and for workers to exit.
    """
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
