"""Tensor parallel: ranks that hold some rows of the weights each, and gather what those give. No sum ever crosses ranks.

A row's dot product runs whole on one rank, over the same input channels in the same order as on a single device. So ranks
change no bit that does not already depend on a weight's number of rows, no group is cut, and no sum depends on how a library
splits a message (docs/decisions/tensor-parallel.md). Not here: processes and their messages (`engine.ranks`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor, cut
from nybble.kernels import nvrtc
from nybble.kernels.peers_hopper import Peers, open_peers

NEWS_S = 0.5
PATIENCE = timedelta(hours=1)  # for a rank that lives and says nothing; a dead one is noticed at once


class Group:
    """rank, size: which of how many; device: this one's. gather: a contiguous tensor, of one shape on all ranks, [..] ->
    [size, ..] in their order, on the current stream. abort: from any thread, ends what waits for ranks that are gone. lost: why
    the group is of no use any more.
    """

    def __init__(self, rank: int, size: int, device: torch.device, gather: Callable[[Tensor], Tensor],
                 abort: Callable[[], object]) -> None:
        self.rank, self.size, self.device, self._gather, self._abort = rank, size, device, gather, abort
        self.peers: Peers | None = None  # a faster way for what fits it
        self.lost: str | None = None
        self._losing = threading.Lock()

    def check(self) -> None:
        """Raises RuntimeError when a rank is gone: then what was gathered means nothing."""
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def lose(self, why: str) -> None:
        with self._losing:
            if self.lost is None:
                self.lost = why
                self._abort()

    def close(self) -> None:
        """Let go of what the library keeps, once the other ranks are gone: at the interpreter's end its threads would abort."""
        self.lose("the group is closed")
        self._gather = ALONE.gather

    def gather(self, x: Tensor) -> Tensor:
        """[..] -> [size, ..]. Raises RuntimeError when a rank is gone."""
        self.check()
        try:
            return self._gather(x.contiguous())
        except RuntimeError as error:
            time.sleep(NEWS_S)  # who watches the ranks knows more
            raise RuntimeError(self.lost or f"a rank is gone: {error}") from error

    def columns(self, x: Tensor, parts: int = 1) -> Tensor:
        """[T, W] -> [T, size * W], of each of `parts` equal pieces of W the ranks' side by side."""
        if self.size == 1 or not len(x):
            return x if self.size == 1 else x.new_empty((0, self.size * x.shape[1]))
        x = x.contiguous()
        if self.peers is not None and self.peers.fits(x, parts):
            self.check()
            return self.peers.columns(x, parts)
        return self.gather(x).unflatten(2, (parts, -1)).permute(1, 2, 0, 3).flatten(1)

    def mean(self, x: Tensor, twins: int) -> Tensor:
        """Over so many neighbouring ranks, of which this is one."""
        first = self.rank // twins * twins
        return x if twins == 1 else self.gather(x)[first : first + twins].mean(0)

    def least(self, value: int) -> int:
        return value if self.size == 1 else int(self.gather(torch.tensor([value], device=self.device)).min())

    def share(self, count: int, unit: int = 1) -> slice:
        """This rank's of `count` things of `unit` rows each; of fewer things than ranks several ranks have the same one."""
        first = self.rank * count // self.size * unit
        return slice(first, first + max(1, count // self.size) * unit)

    def heads(self, scales: Sequence[tuple | None] | None) -> list[tuple | None] | None:
        """Of each layer's scales of K and V, where they are per head this rank's."""
        own = lambda scale: scale[self.share(len(scale))] if isinstance(scale, Tensor) else scale  # noqa: E731
        return None if scales is None else [pair and (own(pair[0]), own(pair[1])) for pair in scales]


ALONE = Group(0, 1, torch.device("cpu"), lambda x: x[None], lambda: None)


def take_rows(weight: QTensor | Tensor, rows: slice) -> QTensor | Tensor:
    """A copy, so that the rest is not kept."""
    return cut(weight, 0, rows.start, rows.stop) if isinstance(weight, QTensor) else weight[rows].clone()


def new_meeting(size: int, device: torch.device) -> tuple[bytes, Any]:
    """What all ranks of a group are told to find each other, NCCL's identifier or on a CPU a port, and what has to be kept for
    as long as the group."""
    if device.type == "cpu":
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        return str(store.port).encode(), store
    identifier = _Identifier()
    _call(_nccl().ncclGetUniqueId, ctypes.byref(identifier))
    return bytes(identifier), None


def open_group(rank: int, size: int, device: torch.device, meeting: bytes) -> Group:
    """Waits for all ranks. NCCL on GPUs, gloo on a CPU; both without torch's global process group, which is the user's."""
    return (_open_gloo if device.type == "cpu" else _open_nccl)(rank, size, device, meeting)


def _open_gloo(rank: int, size: int, device: torch.device, meeting: bytes) -> Group:
    from torch.distributed import ProcessGroupGloo, TCPStore

    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], PATIENCE
    processes = ProcessGroupGloo(TCPStore("127.0.0.1", int(meeting), size), rank, size, options)

    def gather(x: Tensor) -> Tensor:
        out = torch.empty((size, *x.shape), dtype=x.dtype)
        processes.allgather([list(out.view(size, -1).view(torch.uint8))], [x.view(-1).view(torch.uint8)]).wait()
        return out

    return Group(rank, size, device, gather, lambda: None)  # gloo sees by itself that a connection is closed


class _Identifier(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def _nccl() -> ctypes.CDLL:
    """The library that torch has loaded. Called directly: its kernels then are on the current stream, also while a graph is
    recorded, and no thread of torch's watches them."""
    return ctypes.CDLL("librccl.so.1" if torch.version.hip else "libnccl.so.2")


def _call(function: Any, *arguments: Any) -> None:
    if code := function(*arguments):
        text = _nccl().ncclGetErrorString
        text.restype = ctypes.c_char_p
        raise RuntimeError(f"{function.__name__}: {text(code).decode()}")


def _open_nccl(rank: int, size: int, device: torch.device, meeting: bytes) -> Group:
    library, communicator = _nccl(), ctypes.c_void_p()
    with torch.cuda.device(device):
        identifier = _Identifier.from_buffer_copy(meeting)
        _call(library.ncclCommInitRank, ctypes.byref(communicator), size, identifier, rank)

    def gather(x: Tensor) -> Tensor:
        out = torch.empty((size, *x.shape), dtype=x.dtype, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        _call(library.ncclAllGather, *(ctypes.c_void_p(t.data_ptr()) for t in (x, out)), ctypes.c_size_t(x.nbytes), 1,
              communicator, ctypes.c_void_p(stream))  # 1: unsigned bytes
        return out

    def abort() -> None:
        if group.peers is not None:
            group.peers.lost[0] = 1
        library.ncclCommAbort(communicator)

    group = Group(rank, size, device, gather, abort)
    if nvrtc.refusal(device) is None:
        group.peers = open_peers(rank, size, device, gather)
    return group
