"""Codes of a delta's positions and values: varints of gaps, zlib streams that cannot unpack to more than expected.

Imports numpy only.
"""

from __future__ import annotations

import zlib

import numpy as np

VARINT_BYTES = 9  # of the longest number, 63 bits


def varints(values: np.ndarray) -> bytes:
    """[n >= 1] non-negative int64 as LEB128: seven bits a byte, lowest first, the top bit set on all but a number's
    last byte."""
    most = int(values.max())
    if most < 128:
        return values.astype("u1").tobytes()
    lengths = np.ones(len(values), np.int64)
    for bits in range(7, most.bit_length(), 7):
        lengths += (values >> bits) > 0
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), "u1")
    for k in range(int(lengths.max())):
        some = np.flatnonzero(lengths > k)
        more = (lengths[some] > k + 1).astype("u1") << 7
        out[starts[some] + k] = ((values[some] >> (7 * k)) & 0x7F).astype("u1") | more
    return out.tobytes()


def gaps(coded: np.ndarray) -> np.ndarray:
    """The numbers, int64, that `varints` coded as [m] uint8. Raises ValueError when it cannot have."""
    last = coded < 128
    if last.all():
        return coded.astype(np.int64)
    ends = np.flatnonzero(last)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if not len(ends) or ends[-1] != len(coded) - 1 or int(lengths.max()) > VARINT_BYTES:
        raise ValueError("its positions are no sequence of numbers")
    place = np.arange(len(coded)) - np.repeat(starts, lengths)
    numbers: np.ndarray = np.add.reduceat((coded & 0x7F).astype(np.int64) << (7 * place), starts)
    return numbers


def pack(raw: bytes) -> bytes:
    """A zlib stream; nothing for nothing. Entropy coding and runs only: what optimizers write repeats nothing else, and
    looking for it would take three times as long."""
    if not raw:
        return b""
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return packer.compress(raw) + packer.flush()


def unpack(packed: bytes, limit: int) -> np.ndarray:
    """[n <= limit] uint8. Raises ValueError where `packed` is no whole stream or holds more; never allocates more."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof or unpacker.unused_data or len(raw) > limit:
        raise ValueError(f"{len(packed)} bytes are not one stream of at most {limit}")
    return np.frombuffer(raw, "u1")
