"""All-gather and reduce-scatter of FSDP2 through memory that the ranks of one host share, instead of gloo's sockets.

FSDP2 copies a unit's shards into a buffer, gathers, and copies the whole out into its parameters; and copies a unit's
gradients into a buffer, of which each rank then gets the sum of its part. Here those buffers lie in shared memory. So a
gather is nothing but a wait, each rank copying out of what all have written; and a reduction is one pass in which each
rank adds up its own part of everybody's buffers, in the order of the ranks: the sums are the same in every run.

The memory has no name (`memfd`): it isn't bounded by /dev/shm, which containers keep small, and nothing is left over,
however the ranks end. Ranks wait for each other on sockets. A wait costs no CPU, orders memory on every processor
(the kernel's locks do), and ends at once when a peer is gone.
"""

import mmap
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# What `FSDPModule.set_custom_all_gather` and its like take: torch names them only here.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

_MOST_RANKS = 16  # each has a socket to each
_JOIN_SECONDS = 30.0
_ALIGNMENT = 4096  # bytes: no two ranks write to one page


class SharedMemory:
    """The memory and the sockets of one group of ranks.

    A whole unit is gathered at its beginning; to be reduced, each rank has a `piece` of it in bytes. Both take the same
    place: a unit has been copied out before gradients are copied in (see `serve`).
    """

    def __init__(self, memory: Tensor, peers: Sequence[socket.socket], rank: int, piece: int):
        self._memory = memory
        self._peers = peers
        self._rank = rank
        self._ranks = len(peers) + 1
        self._waits = 0
        self._piece_size = piece

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, *, gathered: int, reduced: int, timeout_seconds: float
    ) -> "SharedMemory | None":
        """Memory that all ranks of `group` map, or None on all of them where one can't. Every rank calls this.

        `gathered` is the bytes of the largest unit, `reduced` those of the largest unit's gradients.
        `timeout_seconds` is how long a rank waits for its peers in a collective.
        """
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        piece = -(-reduced // _ALIGNMENT) * _ALIGNMENT
        sockets: list[socket.socket] = []
        memory: Tensor | None = None
        names: list[Any] = [None] * ranks
        listener, name = _listen() if ranks <= _MOST_RANKS else (None, None)
        dist.all_gather_object(names, name, group=group)
        try:
            if listener is not None and None not in names:
                sockets = _connect(listener, names, rank)
                memory = _map(sockets, rank, max(gathered, ranks * piece))
        except OSError:
            memory = None  # peers in another container, or no memory: gloo works there
        finally:
            if listener is not None:
                listener.close()
        there = torch.tensor([memory is not None], dtype=torch.int32)
        dist.all_reduce(there, dist.ReduceOp.MIN, group=group)
        if memory is None or not bool(there):
            for peer in sockets:
                peer.close()
            return None
        for peer in sockets:
            peer.settimeout(timeout_seconds)
        return cls(memory, sockets, rank, piece)

    def serve(self, unit: FSDPModule) -> None:
        """Have `unit` gathered and reduced through this memory.

        And gathered when it is needed, not one unit ahead: on a CPU nothing goes on meanwhile, and a unit that waits to
        be copied out would need memory of its own beside the gradients'.
        """
        unit.set_modules_to_backward_prefetch([unit])
        unit.set_custom_all_gather(_Gather(self))
        unit.set_custom_reduce_scatter(_Reduce(self))

    def gather_buffer(self, size: int) -> Tensor:
        """(size,) bytes that all ranks see, free again: each writes its own part of them before it calls `wait`.

        FSDP2 has copied out what it gathered before it asks for the next, so when all ranks ask, none reads any more.
        """
        self._check(size, self._memory.numel())
        self.wait()
        return self._memory[:size]

    def reduce_buffer(self, size: int) -> Tensor:
        """(size,) bytes of this rank's own, for `reduce`, when its peers have read what was there."""
        self._check(size, self._piece_size)
        self.wait()
        return self._piece(self._rank, 0, size)

    def _piece(self, rank: int, offset: int, size: int) -> Tensor:
        start = rank * self._piece_size + offset
        return self._memory[start : start + size]

    def _check(self, size: int, there: int) -> None:
        if size > there:
            raise RuntimeError(f"a unit of {size} bytes for shared memory of {there}")

    def reduce(self, output: Tensor, buffer: Tensor) -> None:
        """Sum this rank's part of every rank's `reduce_buffer` into `output`; `buffer` is its own."""
        self.wait()
        size = output.numel() * output.element_size()
        parts = [self._piece(rank, self._rank * size, size).view(buffer.dtype) for rank in range(self._ranks)]
        total = output.view(-1)
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part

    def wait(self) -> None:
        """Until every rank has called this as often as this one.

        Raises torch's error of a failed collective where a rank is gone, or doesn't come in time.
        """
        self._waits += 1
        token = bytes([self._waits % 251])
        try:
            for peer in self._peers:
                peer.sendall(token)
            answers = [peer.recv(1) for peer in self._peers]
        except TimeoutError:
            raise dist.DistNetworkError(
                f"a collective in shared memory timed out: {self._peers[0].gettimeout():g} s without a peer"
            ) from None
        except OSError:
            answers = [b""]
        if b"" in answers:
            raise dist.DistNetworkError("a collective in shared memory failed: Connection closed by peer")
        if any(answer != token for answer in answers):
            raise RuntimeError("the ranks are at different collectives in shared memory")

    def close(self) -> None:
        """Hang up; the memory goes when the last tensor in it does."""
        for peer in self._peers:
            peer.close()


class _Comm:
    """What FSDP2 asks for a unit's buffers."""

    def __init__(self, shared: SharedMemory):
        self._shared = shared


class _Gather(_Comm, AllGather):
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _buffer(self._shared.gather_buffer, size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._shared.wait()  # FSDP2 has copied the input into its place in the output


class _Reduce(_Comm, ReduceScatter):
    """FSDP2 asks for the input, then for the output."""

    def __init__(self, shared: SharedMemory):
        super().__init__(shared)
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._input is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = _buffer(self._shared.reduce_buffer, size, dtype)
        return self._input

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"shared memory sums gradients, and {op} was asked for")
        self._input = None
        self._shared.reduce(output_tensor, input_tensor)


def _buffer(place: Callable[[int], Tensor], size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
    (count,) = size
    return place(int(count) * dtype.itemsize).view(dtype)


def _listen() -> tuple[socket.socket | None, str | None]:
    """A socket in the kernel's own namespace of names, which no file is left of; None where there is no such thing."""
    if not hasattr(os, "memfd_create"):
        return None, None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0shardlab-{uuid.uuid4().hex}"
    try:
        listener.bind(name)
        listener.listen(_MOST_RANKS)
    except OSError:
        listener.close()
        return None, None
    listener.settimeout(_JOIN_SECONDS)
    return listener, name


def _connect(listener: socket.socket, names: Sequence[str], rank: int) -> list[socket.socket]:
    """A connection to each peer, by rank. Raises OSError where one can't be reached."""
    found: dict[int, socket.socket] = {}
    for peer in range(rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_JOIN_SECONDS)
        connection.connect(names[peer])
        connection.sendall(bytes([rank]))
        found[peer] = connection
    while len(found) < len(names) - 1:
        connection, _ = listener.accept()
        connection.settimeout(_JOIN_SECONDS)
        found[connection.recv(1)[0]] = connection
    return [found[peer] for peer in sorted(found)]


def _map(peers: Sequence[socket.socket], rank: int, size: int) -> Tensor:
    """The first rank makes the memory and hands it to the others. Raises OSError where that is not possible."""
    if rank == 0:
        descriptor = os.memfd_create("shardlab")
        os.ftruncate(descriptor, size)
        for peer in peers:
            socket.send_fds(peer, [b"m"], [descriptor])
    else:
        _, (descriptor, *_), _, _ = socket.recv_fds(peers[0], 1, 1)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)  # the mapping keeps the memory
