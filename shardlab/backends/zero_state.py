"""Where DeepSpeed keeps a rank's part of the training state: flat fp32 tensors, one or more for each optimizer group.

A stage below 3 cuts a group's concatenated tensors into equal parts; stage 3 cuts each tensor. Either way a rank's
part of a tensor is a range of it, flattened; the padding at the ends belongs to no part. Nothing here is collective
but `publish` and `reload`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from shardlab.backends.optimizer_state import Owner, moments
from shardlab.model.trainable import Trainable
from shardlab.state.box import whole
from shardlab.state.fragment import FROZEN, MASTER, StateReader
from shardlab.state.held import Held, held_range, read_held


@dataclass(frozen=True)
class Part:
    """This rank's part of a trained tensor: `numel` elements from `start` on, in `flat` from `offset` on."""

    name: str
    start: int
    numel: int
    flat: Tensor
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The part's elements, 1-D, of `flat` or of a state of the same shape."""
        return flat.detach()[self.offset : self.offset + self.numel]


class ZeROState:
    """The state behind a DeepSpeed `optimizer` at `stage`, seen from `rank`."""

    def __init__(self, optimizer: Any, module: Trainable, stage: int, rank: int):
        self._optimizer = optimizer
        self._module = module
        self._stage = stage
        self._rank = rank

    def owners(self) -> list[Owner]:
        """The flat tensors, each with its group and the names of all tensors with elements in it on any rank."""
        names = {id(parameter): name for name, parameter in self._module.named_trainables()}
        return [
            Owner(flat, group, tuple(names[id(member)] for member in members)) for flat, group, members in self._flats()
        ]

    def _flats(self) -> list[tuple[Tensor, int, list[nn.Parameter]]]:
        """(flat, index of its group, members)."""
        zero = self._optimizer
        if self._stage == 3:
            groups = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp16_groups))]
            return list(zip(zero.fp32_partitioned_groups_flat, groups, zero.fp16_groups, strict=True))
        if isinstance(zero, BF16_Optimizer):  # stage 1 with gradients added up in fp32
            flats, members = zero.fp32_groups_flat_partition, zero.bf16_groups
        else:
            flats, members = zero.single_partition_of_fp32_groups, zero.bit16_groups
        return list(zip(flats, range(len(flats)), members, strict=True))

    def parts(self) -> Iterator[Part]:
        """Of each trained tensor that this rank has a part of."""
        flats = [flat for flat, _, _ in self._flats()]
        parameter: Any  # DeepSpeed hangs attributes of its own on each
        for name, parameter in self._module.named_trainables():
            if self._stage == 3:
                index, offset, _padded = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                start, numel = self._range(parameter)
                if numel:
                    yield Part(name, start, numel, flats[index], offset)
            elif parameter._hp_mapping is not None:
                mapping = parameter._hp_mapping
                place, flat = mapping.lp_fragment_address, flats[mapping.param_group_index]
                yield Part(name, place.start, place.numel, flat, mapping.hp_fragment_address.start)

    def _range(self, parameter: Any) -> tuple[int, int]:
        """(start, elements) of this rank's part of a tensor at stage 3, where the last parts may be short or empty."""
        padded = parameter.ds_tensor.ds_numel
        start = min(padded * self._rank, parameter.ds_numel)
        return start, min(padded, parameter.ds_numel - start)

    def trained(self) -> Iterator[Held]:
        """Masters and moments; no two ranks hold the same ones."""
        for part in self.parts():
            states = {MASTER: part.of(part.flat)}
            for kind, state in moments(self._optimizer.optimizer, part.flat).items():
                states[kind] = part.of(state)
            yield from held_range(part.name, tuple(self._module.shapes[part.name]), part.start, states)

    def frozen(self) -> Iterator[Held]:
        """Values that are not trained: this rank's parts at stage 3, below it whole on every rank."""
        parameter: Any
        for name, parameter in self._module.named_canonical():
            if parameter.requires_grad:
                continue
            shape = tuple(self._module.shapes[name])
            if self._stage == 3:
                start, numel = self._range(parameter)
                yield from held_range(name, shape, start, {FROZEN: parameter.ds_tensor.detach()[:numel]})
            else:
                box = whole(shape)
                if box is not None:
                    yield Held(name, shape, box, {FROZEN: parameter.detach()})

    def reload(self, reader: StateReader) -> None:
        """Make the weights that compute, on a CPU of one host, where `reader` gave the masters. Bit-equal to `publish`.

        Below stage 3 each rank reads the weights whole, from pages that the host has just read, for all ranks: a gather
        over gloo takes several times as long (docs/decisions.md). Every rank calls this.
        """
        if self._stage == 3:
            self.publish()
            return
        for name, parameter in self._module.named_trainables():
            box = whole(tuple(self._module.shapes[name]))
            if box is not None:
                read_held([Held(name, tuple(self._module.shapes[name]), box, {MASTER: parameter.detach()})], reader)

    @torch.no_grad()
    def publish(self) -> None:
        """Make the weights that compute from the masters, after these were written. Every rank calls this."""
        if self._stage < 3:
            self._optimizer.update_lp_params()
            return
        for index in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(index)
        # Small parameters stay gathered between steps: dropped here, they are gathered anew when next used.
        gathered = self._optimizer.persistent_parameters
        if gathered:
            gathered[0].partition(gathered)
