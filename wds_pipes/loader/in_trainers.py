"""A PipeLoader or a dataset of ours in a trainer that takes it for something else.

Rules:
1. Lightning's CombinedLoader flattens the loaders that it gets as a pytree of torch. So a
   PipeLoader is registered as one, whose only leaf is the loader as Lightning sees it. Lightning
   requests the state of this leaf when it saves a checkpoint in ``fit``, and nobody else does.
2. Accelerate knows which of its loaders is iterated now, and over which dataset. The Trainer of
   transformers iterates over such a loader.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import register_pytree_node

from wds_pipes.errors import StateError, mended, parts

if TYPE_CHECKING:
    from wds_pipes.core.stage import State

IN_LIGHTNING = (
    "Use wds_pipes.lightning.WdsDataModule, or return self.resumable(loader) from a DataModule of "
    "your own that inherits wds_pipes.lightning.ResumableData."
)
IN_TRANSFORMERS = "For the Trainer of transformers, pass a PipeLoader to wds_pipes.huggingface.PipeTrainer."


def register_for_lightning(kind: type[Any]) -> None:
    """Let Lightning see instances of ``kind``, PipeLoader, as ``InLightning``: rule 1."""
    register_pytree_node(kind, lambda loader: ([InLightning(loader)], None), _of_leaf)


def _of_leaf(leaves: Any, context: Any) -> Any:
    """Return what Lightning makes of the loader's leaf: the loader, or a batch."""
    (leaf,) = leaves
    return leaf.loader if isinstance(leaf, InLightning) else leaf


class InLightning:
    """A PipeLoader that was passed to Lightning's Trainer itself.

    Lightning's checkpoints do not hold its exact position, and from the loader's side that cannot
    be mended: Lightning fetches a batch ahead if the length is not known, stores the state of rank
    0 for all ranks, and does not load the state from a checkpoint at the end of an epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._warned = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> State:
        if self.loader.rank.number == 0 and not self._warned:
            self._warned = True
            warnings.warn(
                "Lightning saves a checkpoint in which the position of a PipeLoader is not exact: a resume may lose or "
                f"repeat batches. {IN_LIGHTNING}",
                stacklevel=1,  # users ignore the warnings of Lightning's own modules
            )
        state: State = self.loader.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        try:
            self.loader.load_state_dict(state)
        except StateError as error:
            what, mends = parts(error, IN_LIGHTNING)
            raise StateError(what, **mends) from error


def loader_of_accelerate(dataset: object) -> Any:
    """Return the loader of Accelerate that is iterated now over ``dataset``; None: none is."""
    module = sys.modules.get("accelerate.data_loader")
    loader = None if module is None else module.GradientState().active_dataloader
    part = getattr(loader, "dataset", None)
    while part is not None and part is not dataset:
        part = getattr(part, "dataset", None)  # Accelerate divides a dataset over the ranks by a dataset over it
    return None if part is None else loader


def no_dataset() -> TypeError:
    """An error for a DataLoader over a PipeLoader."""
    return mended(
        TypeError,
        "a PipeLoader yields batches, and is no dataset of a DataLoader",
        mend=f"Iterate it in the place of the DataLoader. {IN_TRANSFORMERS}",
    )


def is_in_trainer(dataset: object) -> bool:
    """Whether the Trainer of transformers iterates over ``dataset`` now."""
    return "transformers.trainer" in sys.modules and loader_of_accelerate(dataset) is not None


def warn_of_trainer() -> None:
    """Warn that the Trainer of transformers iterates over a dataset whose length is not known."""
    warnings.warn(
        "The Trainer of transformers resumes by skipping batches, and numbers epochs by the length of the data, "
        "which is not known here: after the first epoch, a resume continues at another place. "
        f"{IN_TRANSFORMERS}",
        stacklevel=2,
    )
