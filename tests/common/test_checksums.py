"""The checksum is the function that it is defined to be, however its bytes come, and sees what goes wrong with them."""

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.checksums import Checksum, checksum_of, copy_with_checksum

U64 = (1 << 64) - 1
Accident = Callable[[list[int], random.Random], None]
Function = Callable[[bytes], int]
KNOWN = {"kvblend": 3484912420384293917, "bytes": 4867250950172381062}


def mix(word: int) -> int:
    word = ((word ^ word >> 32) * 0xBF58476D1CE4E5B9) & U64
    word = ((word ^ word >> 29) * 0x94D049BB133111EB) & U64
    return word ^ word >> 32


def reference(data: bytes) -> int:
    """By the definition: the length, then the words, each with its number."""
    padded = data + bytes(-len(data) % 8)
    words = [len(data), *(int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))]
    return sum(mix(word ^ (number * 0x9E3779B97F4A7C15 & U64)) for number, word in enumerate(words)) & U64


@given(st.binary(max_size=300))
def test_it_is_what_its_definition_says(data: bytes) -> None:
    assert checksum_of(data) == reference(data)


def test_known_values() -> None:
    """What is stored must mean the same in every release."""
    assert checksum_of(b"") == 0
    assert checksum_of(b"kvblend") == reference(b"kvblend") == KNOWN["kvblend"]
    assert checksum_of(bytes(range(256))) == KNOWN["bytes"]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_pieces_of_any_length_give_the_checksum_of_the_whole(data: bytes, cuts: list[int]) -> None:
    checksum = Checksum()
    for first, end in pairwise(sorted([0, *cuts, 200])):
        checksum.update(memoryview(data)[first:end])
    assert checksum.value() == checksum_of(data)


@given(st.binary(max_size=200), st.integers(0, 9), st.integers(0, 9))
def test_a_copy_is_whole_and_has_its_checksum_wherever_it_lies(data: bytes, before: int, ahead: int) -> None:
    source = np.frombuffer(bytes(before) + data, np.uint8)[before:]
    memory = np.full(len(data) + 20, 0xAA, np.uint8)
    target = memory[ahead : ahead + len(data)]
    assert copy_with_checksum(target, source) == checksum_of(source.data) == reference(data)
    assert target.tobytes() == data
    target[:] = 0xAA
    assert (memory == 0xAA).all(), "a byte beside the target was written"


def flip_one_bit(words: list[int], dice: random.Random) -> None:
    words[dice.randrange(len(words))] ^= 1 << dice.randrange(64)


def flip_the_same_bit_twice(words: list[int], dice: random.Random) -> None:
    bit = 1 << dice.choice((0, 15, 31, 32, 47, 62, 63))
    for place in dice.sample(range(len(words)), 2):
        words[place] ^= bit


def stuck_bit(words: list[int], dice: random.Random) -> None:
    first, bit = dice.randrange(len(words) // 2), 1 << dice.choice((7, 31, 63))
    words[first:] = [word | bit for word in words[first:]]


def swap_two(words: list[int], dice: random.Random) -> None:
    one, two = dice.sample(range(len(words)), 2)
    words[one], words[two] = words[two], words[one]


def swap_halves(words: list[int], _: random.Random) -> None:
    middle = len(words) // 2
    words[:] = words[middle:] + words[:middle]


def shift_by_one(words: list[int], _: random.Random) -> None:
    words.insert(0, words.pop())


def zero_some(words: list[int], dice: random.Random) -> None:
    first = dice.randrange(len(words) - 8)
    words[first : first + 8] = [0] * 8


def repeat_some(words: list[int], dice: random.Random) -> None:
    first = dice.randrange(len(words) - 16)
    words[first + 8 : first + 16] = words[first : first + 8]


def move_value(words: list[int], dice: random.Random) -> None:
    """What one gains the other loses: sums stay."""
    one, two = dice.sample(range(len(words)), 2)
    words[one], words[two] = (words[one] + 1) & U64, (words[two] - 1) & U64


ACCIDENTS = [
    flip_one_bit,
    flip_the_same_bit_twice,
    stuck_bit,
    swap_two,
    swap_halves,
    shift_by_one,
    zero_some,
    repeat_some,
    move_value,
]


def kv_like(dice: random.Random) -> list[int]:
    """Words of small, similar bf16 numbers, as KV has them."""
    return [int.from_bytes(bytes([dice.randrange(256), 0x3F] * 4), "little") for _ in range(64)]


def unseen(accident: Accident, function: Function) -> int:
    """How many of a few thousand accidents leave the value as it was."""
    dice, missed = random.Random(7), 0
    for _ in range(2000):
        words = kv_like(dice)
        damaged = list(words)
        accident(damaged, dice)
        if damaged != words:
            before, after = (b"".join(word.to_bytes(8, "little") for word in each) for each in (words, damaged))
            missed += function(before) == function(after)
    return missed


@pytest.mark.parametrize("accident", ACCIDENTS, ids=lambda accident: accident.__name__)
def test_accidents_are_seen(accident: Accident) -> None:
    assert unseen(accident, checksum_of) == 0


def sum_of_words(data: bytes) -> int:
    return sum(np.frombuffer(data, "<u8").tolist()) & U64


def numbered_sum(data: bytes) -> int:
    words = np.frombuffer(data, "<u8").tolist()
    return sum(word * (2 * number + 1) for number, word in enumerate(words)) & U64


@pytest.mark.parametrize(
    ("accident", "weak"),
    [(swap_two, sum_of_words), (flip_the_same_bit_twice, numbered_sum), (move_value, sum_of_words)],
)
def test_weaker_sums_miss_them(accident: Accident, weak: Function) -> None:
    assert unseen(accident, weak) > 100


@given(st.binary(max_size=64), st.integers(1, 64))
def test_zeros_behind_the_end_count(data: bytes, more: int) -> None:
    assert checksum_of(data + bytes(more)) != checksum_of(data)
