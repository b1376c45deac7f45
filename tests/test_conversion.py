"""The instruction counts of QQQ's conversions (arXiv 2406.09904), from what the assembler really makes."""

import pytest

from nybble.bench.conversion import expected, instructions


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_fast_conversions_take_a_fraction_of_the_ordinary_ones(target: str) -> None:
    # two ANDs and a shift; 17 with the shift of the second half, constants outside
    assert 3 <= instructions("FastINT4toINT8", target) < 4
    assert 14 <= instructions("FastFP16toINT8", target) <= 18
    assert instructions("int4 -> int8, ordinary", target) >= 16
    assert instructions("int4 x scale -> int8, ordinary", target) >= 32


def test_expected_bytes_of_a_word_by_hand() -> None:
    # nibbles 1..8 from the lowest; 8 is -8 in two's complement
    assert expected("FastINT4toINT8", 0x87654321, 1.0) == (0x70503010, 0x80604020)
    assert expected("int4 -> int8, ordinary", 0x87654321, 1.0) == (0x07050301, 0xF8060402)
    # (nibble - 8) * 2: -14, -12, -10, -8, -6, -4, -2, 0
    assert expected("FastFP16toINT8", 0x87654321, 2.0) == (0xFCF4FAF2, 0x00F8FEF6)
