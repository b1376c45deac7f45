"""Parts of a GPU: streams whose kernels run on some of its multiprocessors only, so that two steps run side by side.

Built on the driver's green contexts (CUDA 12.4). What a kernel wants to know of its stream is here: how many processors it may
fill, and which of the memory that launches share (`lane`) nobody beside it uses. Neither moves a bit of any result.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from nybble.kernels.nvrtc import check, driver

SHARE = 0.29  # of the multiprocessors: enough for the prompts of usual chats beside generated tokens, 40 of an H200's 132
LANES = 2  # kernels that share memory among launches have it so many times
GRANULE = 8  # of Hopper's multiprocessors: a part has a multiple of it
MULTIPROCESSORS, DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1  # of CUdevResourceType, CUgreenCtxCreate_flags, CUstream_flags


class Part(NamedTuple):
    """What the kernels of a stream may use."""

    processors: int
    lane: int = 0


class Resource(ctypes.Structure):
    """CUdevResource, of which only the number of multiprocessors is read."""

    _fields_ = [("type", ctypes.c_int), ("pad", ctypes.c_ubyte * 92), ("processors", ctypes.c_uint * 12)]


@functools.cache
def _parts() -> dict[int, Part]:
    """Of the streams made here, by handle: a stream outlives every graph recorded on it."""
    return {}


@functools.cache
def _whole(device: int) -> Part:
    return Part(torch.cuda.get_device_properties(device).multi_processor_count)


def part(device: int) -> Part:
    """Of the current stream."""
    parts = _parts()
    return (parts and parts.get(torch.cuda.current_stream(device).cuda_stream)) or _whole(device)


def usual_counts(device: int) -> tuple[int, ...]:
    """How many multiprocessors the streams of an engine have: all, and those of the two parts of the usual `split`."""
    whole = _whole(device).processors
    apart = -(-round(SHARE * whole) // GRANULE) * GRANULE
    return whole, whole - apart, apart


def processors(device: int) -> int:
    """How many multiprocessors the current stream's kernels may fill."""
    return part(device).processors


def lane(device: torch.device) -> int:
    """Which of `LANES` the current stream's kernels are in."""
    return part(device.index or 0).lane if _parts() else 0


def share(count: int, device: int) -> int:
    """What is left of `count` programs that would fill the whole GPU."""
    return max(1, count * processors(device) // _whole(device).processors)


@functools.cache
def split(device: torch.device, apart: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Streams over all but `apart` of the multiprocessors (lane 0, served first) and over those `apart` (lane 1), rounded up to
    what the hardware parts. Raises RuntimeError with the driver's reason when it cannot."""
    cuda, index = driver(), device.index or 0
    torch.cuda.current_stream(device).synchronize()  # the context exists
    whole, some, rest = Resource(), (Resource * 1)(), Resource()
    groups, streams = ctypes.c_uint(1), []
    check(cuda.cuDeviceGetDevResource(index, ctypes.byref(whole), MULTIPROCESSORS), "asking for the multiprocessors")
    check(cuda.cuDevSmResourceSplitByCount(some, ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(rest), 0, apart),
          f"parting {apart} multiprocessors")
    for lane, resource in enumerate((rest, some[0])):
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuDevResourceGenerateDesc(ctypes.byref(description), (Resource * 1)(resource), 1), "describing a part")
        check(cuda.cuGreenCtxCreate(ctypes.byref(context), description, index, DEFAULT_STREAM), "making a part's context")
        check(cuda.cuGreenCtxStreamCreate(ctypes.byref(stream), context, NON_BLOCKING, -1 if lane == 0 else 0), "its stream")
        _parts()[stream.value or 0] = Part(resource.processors[0], lane)
        streams.append(torch.cuda.ExternalStream(stream.value, device=device))
    return streams[0], streams[1]
