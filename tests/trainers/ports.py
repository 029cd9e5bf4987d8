"""The functions of tutorials/10_moving_from_webdataset.py, as a module that other processes can
import.
"""

import ast
import os
from pathlib import Path

import torch
import torch.distributed as dist
from documents import ROOT

from wds_pipes import checkpoint

CHAPTER = ROOT / "tutorials" / "10_moving_from_webdataset.py"
PORTS = ("open_clip", "timm", "diffusers", "resnet")


def _is_kept(node):
    """Whether a statement only defines something, without webdataset."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return not any(name.name in ("webdataset", "wids") for name in node.names)
    return isinstance(node, ast.FunctionDef) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
    )


_kept = [node for node in ast.parse(CHAPTER.read_text()).body if _is_kept(node)]
exec(compile(ast.Module(_kept, []), str(CHAPTER), "exec"))


def use_photos():
    """Let the ports read the photos in the current directory, and write them if necessary."""
    names = globals()
    for source, first, count in (("laion", 0, 160), ("cc12m", 1000, 80)):
        if not Path(source).exists():
            names["write_photos"](source, first, count)
        names[source] = sorted(map(str, Path(source).glob("*.tar")))


def train_on_ranks(directory, steps, cut):
    """Train open_clip's port on this rank; stop after a step, and resume from files."""
    os.chdir(directory)
    use_photos()
    whole = _train(steps, None)
    assert len(whole) == steps
    saved = directory / "checkpoints"
    saved.mkdir(exist_ok=True)
    assert _train(cut, saved) + _train(steps, saved) == whole


def _train(until, saved):
    """Train up to a step, from the newest checkpoint in ``saved`` if there is one.

    Return the losses, and the sums of this rank's images.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 16 * 16, 1)
    loader = globals()["open_clip"]()
    step = checkpoint.load(saved, loader) or 0 if saved else 0
    if step:
        model.load_state_dict(torch.load(saved / f"model-{step}.pt", weights_only=True))
    found = []
    while step < until:
        for images, texts in loader:
            assert len(images) == len(texts) == 8
            loss = model(images.flatten(1)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)  # waits for the other rank
                    parameter -= 1e-3 * parameter.grad
            found.append((loss.item(), images.sum().item()))
            step += 1
            if step == until:
                break
    if saved:
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), saved / f"model-{step}.pt")
        dist.barrier()
        checkpoint.save(saved, loader, step=step)
    loader.close()
    return found
