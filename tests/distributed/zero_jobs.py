"""DeepSpeed alone trains and saves by its own `save_checkpoint`; run by the pool."""

from typing import Any

import torch
from torch import Tensor, nn

from shardlab.runtime.extensions import without_shm_comm
from shardlab.topology import Topology


class Small(nn.Module):
    """A tied head, frozen tensors, a buffer, two equal shapes with rates of their own, and 5 rows on 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.a, self.c = nn.Linear(6, 5), nn.Linear(6, 5)
        self.b = nn.Linear(5, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens))
        hidden = hidden + self.b(torch.tanh(self.a(hidden)) * self.c(hidden))
        logits: Tensor = self.head(hidden)
        return logits.float().logsumexp(-1).mean()


def save_zero(directory: str, stage: int, bf16: bool) -> list[float]:
    """Three steps of AdamW with two groups, a save, and three more at stage 3; the losses of these."""
    engine = _engine(stage, bf16)
    _train(engine, range(3))
    engine.save_checkpoint(directory)
    losses = _train(engine, range(3, 6)) if stage == 3 else []
    engine.destroy()
    return losses


def _engine(stage: int, bf16: bool) -> Any:
    without_shm_comm()
    import deepspeed

    Topology.detect()  # sets LOCAL_RANK, which DeepSpeed asks for
    torch.manual_seed(0)
    module = Small()
    own = list(module.a.parameters())
    rest = [p for p in module.parameters() if p.requires_grad and not any(p is one for one in own)]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 1e-2}, {"params": own, "lr": 1e-3, "weight_decay": 0.0}])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": 60},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(10 * step + engine.global_rank)
        loss = engine(torch.randint(0, 11, (2, 4)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def load_zero(directory: str, bf16: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Load at stage 3; masters and moments whole by "name|kind", and the losses of the next three steps."""
    engine = _engine(stage=3, bf16=bf16)
    found, _ = engine.load_checkpoint(directory)
    assert found is not None
    assert engine.global_steps == 3
    result = _gathered(engine), _train(engine, range(3, 6))
    engine.destroy()
    return result


def _gathered(engine: Any) -> dict[str, Tensor]:
    """Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"{name}|master"] = safe_get_full_fp32_param(parameter).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{name}|{kind}"] = safe_get_full_optimizer_state(parameter, kind).clone()
        else:
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameter):
                found[f"{name}|frozen"] = parameter.detach().clone()
    return found
