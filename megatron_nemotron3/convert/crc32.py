"""The CRC32 of two byte strings one behind the other, from the CRC32 of each: no byte is looked at twice.

A CRC32 is a polynomial over GF(2), modulo the one of IEEE 802.3; n bytes behind it multiply it by x^(8n).
Bit 31 of an integer is the coefficient of x^0, as in zlib.
"""

from __future__ import annotations

from functools import lru_cache

_MODULUS = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23


def combine(first: int, second: int, length: int) -> int:
    """zlib.crc32(a + b) from crc32(a), crc32(b) and the length of b in bytes."""
    return _times(_shift(length), first) ^ second


@lru_cache(1 << 10)  # a checkpoint has few lengths, each of them often
def _shift(length: int) -> int:
    """x^(8 length)."""
    result, square = _ONE, _X8
    while length:
        if length & 1:
            result = _times(square, result)
        square = _times(square, square)
        length >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials; `a` is not 0."""
    result, bit = 0, _ONE
    while True:
        if a & bit:
            result ^= b
            if not a & (bit - 1):
                return result
        bit >>= 1
        b = (b >> 1) ^ _MODULUS if b & 1 else b >> 1
