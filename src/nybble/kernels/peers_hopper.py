"""Gathering between Hopper GPUs of one machine by writing into each other's memory (`peers_sm90.cu`), where a library's start
and end cost more than the bytes do. Other GPUs, and those that do not reach each other's memory, have NCCL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nybble.kernels import nvrtc

MOST_BLOCKS, MOST_WORDS, THREADS = 128, 2048, 512
FEW_WORDS = 4096  # up to so many (64 KiB) each brings its turn along
MOST_BYTES = MOST_BLOCKS * MOST_WORDS * 16  # of a launch


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("bytes", ctypes.c_byte * 64)]


def arguments(ranks: int) -> type[ctypes.Structure]:
    """`Arguments` of the .cu."""
    fields = [("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("room", ctypes.c_void_p * ranks), ("turn", ctypes.c_void_p),
              ("lost", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("rank", "words", "of_row", "of_part", "of_block"))]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def source_and_defines(ranks: int) -> tuple[str, dict[str, int]]:
    return nvrtc.source("peers_sm90.cu"), {"RANKS": ranks, "MOST_BLOCKS": MOST_BLOCKS, "MOST_WORDS": MOST_WORDS,
                                           "THREADS": THREADS, "OUT": 0}  # fmt: skip


def room_bytes(ranks: int) -> int:
    """Of what each GPU has for the others to write to: zeros at first."""
    return 2 * ranks * MOST_BLOCKS * (MOST_WORDS + 2 * THREADS) * 16 + ranks * MOST_BLOCKS * 4


class Peers:
    """rooms: addresses, as this rank sees them, of all ranks' `room_bytes`. lost: not 0 ends all waiting; what was gathered
    then means nothing."""

    def __init__(self, rank: int, rooms: Sequence[int], device: torch.device) -> None:
        ranks = len(rooms)
        self.device, self._ranks, self._arguments = device, ranks, arguments(ranks)
        self.lost = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._turn = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)
        code = nvrtc.machine_code(*source_and_defines(ranks))
        self._many, self._few = (nvrtc.load(code, name, 0, device.index) for name in ("gather", "gather_few"))
        self._fixed = {"room": (ctypes.c_void_p * ranks)(*rooms), "rank": rank, "turn": self._turn.data_ptr(),
                       "lost": self.lost.data_ptr()}  # fmt: skip

    def fits(self, x: Tensor, parts: int) -> bool:
        """x: contiguous [T, W]."""
        row = x.shape[1] * x.itemsize
        return row % (16 * parts) == 0 and x.data_ptr() % 16 == 0 and row <= MOST_BYTES

    def columns(self, x: Tensor, parts: int) -> Tensor:
        """[T, W] -> [T, ranks * W], of each of `parts` equal pieces of W the ranks' side by side."""
        out = torch.empty((x.shape[0], self._ranks * x.shape[1]), dtype=x.dtype, device=x.device)
        row, first = x.shape[1] * x.itemsize, x.data_ptr()
        for start in range(0, x.nbytes, MOST_BYTES // row * row):
            words = min(MOST_BYTES // row * row, x.nbytes - start) // 16
            few = words <= FEW_WORDS
            blocks = -(-words // THREADS) if few else min(MOST_BLOCKS, -(-words // 256))
            given = self._arguments(x=first + start, out=out.data_ptr() + start * self._ranks, words=words, of_row=row // 16,
                                    of_part=row // 16 // parts, of_block=-(-words // blocks), **self._fixed)
            nvrtc.launch(self._few if few else self._many, blocks, THREADS, 0, 1, (given,), self.device)
        return out


def open_peers(rank: int, ranks: int, device: torch.device, gather: Callable[[Tensor], Tensor]) -> Peers | None:
    """None on all ranks where a GPU does not reach another's memory. gather: every rank's tensor of one shape, [..] ->
    [ranks, ..]."""
    cuda, own, handle, rooms = nvrtc.driver(), ctypes.c_uint64(), Handle(), []
    size = ctypes.c_size_t(room_bytes(ranks))
    nvrtc.check(cuda.cuMemAlloc_v2(ctypes.byref(own), size), "mailboxes")
    nvrtc.check(cuda.cuMemsetD8_v2(own, 0, size), "empty mailboxes")
    status = cuda.cuIpcGetMemHandle(ctypes.byref(handle), own)
    for other, theirs in enumerate(gather(torch.tensor(list(bytes(handle)), dtype=torch.uint8, device=device)).tolist()):
        there = ctypes.c_uint64(own.value)
        if other != rank:
            status = status or cuda.cuIpcOpenMemHandle_v2(ctypes.byref(there), Handle.from_buffer_copy(bytes(theirs)), 1)
        rooms.append(there.value)
    if int(gather(torch.tensor([status], device=device)).max()):
        return None
    return Peers(rank, rooms, device)
