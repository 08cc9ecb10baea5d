"""PyTorch alone trains with FSDP2 (one process: plain), and saves and loads by DCP; run by the pool."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.distributed.zero_jobs import Small

Saved = dict[str, Tensor]


def build(plain: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`Small` with the groups that the ZeRO jobs have."""
    torch.manual_seed(0)
    module: nn.Module = Small()
    if not plain:
        fully_shard(module)
    own = list(module.a.parameters())  # type: ignore[union-attr]
    rest = [p for p in module.parameters() if p.requires_grad and not any(p is one for one in own)]
    return module, torch.optim.AdamW([{"params": rest, "lr": 1e-2}, {"params": own, "lr": 1e-3, "weight_decay": 0.0}])


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The loss of each step."""
    losses = []
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        loss = module(torch.randint(0, 11, (2, 4)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gathered(module: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """Weights and optimizer state whole, by the keys of the checkpoint."""
    model, state = get_state_dict(module, optimizer)
    found = {f"model.{name}": value for name, value in model.items()}
    for name, kept in state["state"].items():
        found |= {f"{name}.{kind}": value for kind, value in kept.items()}
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for key, value in found.items()
        if isinstance(value, Tensor)
    }


def save_dcp(directory: str, form: str = "nested", plain: bool = False) -> tuple[Saved, list[float]]:
    """Three steps, a save, and three more; what was saved and the losses after it. `form`: how it is named."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    module, optimizer = build(plain)
    train(module, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model, state = get_state_dict(module, optimizer, options=options)
    nested: dict[str, Any] = {"model": model, "optimizer": state, "step": 3, "rng": {"cpu": torch.get_rng_state()}}
    dcp.save(model if form == "model" else {"app": nested} if form == "app" else nested, checkpoint_id=directory)
    saved = gathered(module, optimizer)
    return saved, train(module, optimizer, range(3, 6))


def load_dcp(directory: str, plain: bool = False) -> tuple[Saved, list[float]]:
    """Load by DCP's own means; what there is then and the losses of three more steps."""
    module, optimizer = build(plain)
    train(module, optimizer, range(1))  # it must all be overwritten
    model, state = get_state_dict(module, optimizer)
    content = {"model": model, "optimizer": state}
    dcp.load(content, checkpoint_id=directory)
    set_state_dict(module, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    loaded = gathered(module, optimizer)
    return loaded, train(module, optimizer, range(3, 6))
