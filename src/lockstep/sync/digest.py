"""The digest of a leaf: what it is, and computing it in host memory.

Of a leaf whose elements, as unsigned integers, are w_i at global index i = (i_0, i_1, ...), each of two lanes is

    sum_i  fold(w_i) * K_0(i_0) * K_1(i_1) * ...   mod 2^64

where K_d(i) are fixed odd 32-bit numbers of the lane, drawn by SplitMix64 (G. Steele et al., OOPSLA 2014) from d and i.
Elements of 64 bits are two of 32, in a dim of their own; `fold` (w xor w >> 16) brings the upper half of 32 bits down.

- One changed element changes every lane, always: its difference, not 0 and below 2^32 in size, times odd numbers is not
  0 mod 2^64.
- Any other change goes unnoticed when two such sums cancel. For numbers drawn at random a lane cancels with a
  probability below 2^-29 - the chance that one more number K hits the one value that makes a sum 0, once per dim, and
  that trailing zero bits of the terms add up to 64 - and both lanes with one below 2^-58.
- It is linear. Shards, pieces of fused leaves, strides and transposes are sums in which only the K differ, so it does
  not depend on how a leaf is cut, and what it must be after a format map follows from the source alone. Zeros count
  nothing, which is why the shape is part of it.

It is meant against faults, not against forgery. NaNs, infinities and zeros of either sign are content like everything
else.
"""

from __future__ import annotations

import re
from functools import lru_cache

import ml_dtypes  # noqa: F401  (teaches numpy the names `bfloat16` and `float8_*`)
import numpy as np

from lockstep.errors import SyncError

LANES = 2
FOLD = 16  # bits
_GOLDEN = 0x9E3779B97F4A7C15
_NUMBERS = re.compile(r"u?int(8|16|32|64)|b?float(16|32|64)|float8_\w+")
_CHUNK = 1 << 16  # elements that are widened at a time: they stay in the cache


@lru_cache(maxsize=4096)
def keys(dim: int, start: int, step: int, count: int) -> np.ndarray:
    """[LANES, count] uint32, odd: K_dim of the indices start, start + step, ..."""
    index = np.arange(count, dtype=np.uint64) * np.uint64(step) + np.uint64(start)
    found = np.stack([_splitmix(_seed(dim, lane) + index * np.uint64(_GOLDEN)) for lane in range(LANES)])
    result: np.ndarray = (found >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    result.setflags(write=False)
    return result


def _seed(dim: int, lane: int) -> np.ndarray:
    return _splitmix(np.array([LANES * dim + lane + 1], np.uint64))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def kind(dtype: str, shape: tuple[int, ...]) -> str:
    """`float32[576,192]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def spell(dtype: str, shape: tuple[int, ...], lanes: np.ndarray) -> str:
    """The digest as text, `float32[576,192]:` and 32 hex digits. lanes: [LANES] uint64."""
    return f"{kind(dtype, shape)}:{int(lanes[0]):016x}{int(lanes[1]):016x}"


def word_bytes(dtype: np.dtype, path: str) -> int:
    """Bytes per element. Raises SyncError naming the leaf for types that are not integers or floats of whole bytes."""
    if not _is_number(dtype):
        raise SyncError(f"digest: {path} has type {dtype.name}; weights are integers or floats of 1, 2, 4 or 8 bytes")
    return dtype.itemsize


@lru_cache(maxsize=64)
def _is_number(dtype: np.dtype) -> bool:
    return bool(_NUMBERS.fullmatch(dtype.name))


def host_digest(array: np.ndarray, path: str = "the leaf") -> str:
    """The digest of a leaf in host memory, the very text that `verify.leaf_digests` gives for the same content.

    A contiguous array is never copied, only chunks of it. Raises SyncError naming `path` as `word_bytes` does.
    """
    size = word_bytes(array.dtype, path)
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    words = np.ascontiguousarray(native).reshape(-1).view(f"u{min(size, 4)}")
    return spell(array.dtype.name, array.shape, _sums(words.reshape(array.shape + (2,) * (size == 8))))


def _sums(words: np.ndarray) -> np.ndarray:
    """[LANES] uint64: the sums over [...] unsigned words."""
    if not words.size or not words.ndim:
        return np.full(LANES, _widen(words).sum(dtype=np.uint64))
    by_dim = [keys(dim, 0, 1, size).astype(np.uint64) for dim, size in enumerate(words.shape)]
    # As a matrix: the last dim, and all before it with the products of their keys.
    leading = np.ones((LANES, 1), np.uint64)
    for more in by_dim[:-1]:
        leading = (leading[:, :, None] * more[:, None, :]).reshape(LANES, -1)
    columns = words.shape[-1]
    matrix = words.reshape(-1, columns)
    total = np.zeros((LANES, columns), np.uint64)
    # Rows that are longer than a chunk are cut too: a leaf of one dim is one row.
    width, height = min(columns, _CHUNK), max(1, _CHUNK // columns)
    for row in range(0, len(matrix), height):
        for column in range(0, columns, width):
            part = _widen(matrix[row : row + height, column : column + width])
            for lane in range(LANES):
                total[lane, column : column + width] += np.einsum("r,rc->c", leading[lane, row : row + height], part)
    result: np.ndarray = (total * by_dim[-1]).sum(axis=1, dtype=np.uint64)
    return result


def _widen(words: np.ndarray) -> np.ndarray:
    folded = words ^ (words >> FOLD) if words.dtype.itemsize == 4 else words
    return np.asarray(folded, np.uint64)
