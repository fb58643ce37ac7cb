"""The batch-size identity: what is left out is computed, and what can't be is explained with a mend that works."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_engine import BatchSizes, Config, ConfigError

SIZES = st.integers(1, 64)
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@given(micro=SIZES, accumulation=SIZES, dp=SIZES)
def test_any_two_give_the_third(micro: int, accumulation: int, dp: int) -> None:
    whole = BatchSizes(micro * accumulation * dp, micro, accumulation)
    for train, micros, steps in (
        (whole.train, micro, accumulation),
        (None, micro, accumulation),
        (whole.train, None, accumulation),
        (whole.train, micro, None),
    ):
        assert BatchSizes.solve(train, micros, steps, dp) == whole


@given(size=SIZES, dp=SIZES)
def test_one_alone_takes_one_micro_batch_a_step(size: int, dp: int) -> None:
    assert BatchSizes.solve(None, size, None, dp) == BatchSizes(size * dp, size, 1)
    assert BatchSizes.solve(size * dp, None, None, dp) == BatchSizes(size * dp, size, 1)


@given(
    train=st.none() | st.integers(1, 500), micro=st.none() | SIZES, accumulation=st.none() | SIZES, dp=st.integers(1, 9)
)
def test_the_identity_holds_or_every_mend_works(
    train: int | None, micro: int | None, accumulation: int | None, dp: int
) -> None:
    given_sizes = dict(zip(NAMES, (train, micro, accumulation)))
    assume(train is not None or micro is not None)
    try:
        found = BatchSizes.solve(train, micro, accumulation, dp)
    except ConfigError as error:
        message = str(error)
    else:
        assert found.train == found.micro * found.accumulation * dp
        for wanted, got in zip((train, micro, accumulation), (found.train, found.micro, found.accumulation)):
            assert wanted in (None, got)
        return
    for name, size in given_sizes.items():
        assert (f"{name}={size}," in message) == (size is not None), "it shows what was given"
    assert f"{dp} ranks" in message
    _, mends = message.split("; set ")
    found_mends = re.findall(r"(\w+)=(\d+)(?: or (\d+))?", mends)
    settings = [(name, int(size)) for name, *sizes in found_mends for size in sizes if size]
    assert settings
    for name, size in settings:
        mended = {**given_sizes, name: size}
        BatchSizes.solve(*mended.values(), dp)
    if "leave train_batch_size out" in message:
        BatchSizes.solve(None, micro, accumulation, dp)


def test_the_message_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchSizes.solve(32, 4, 3, 2)
    assert str(caught.value) == (
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks: "
        "train_batch_size=32, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3, 2 ranks: "
        "4 x 3 x 2 = 24, not 32; set train_batch_size=24, or gradient_accumulation_steps=4, or leave "
        "train_batch_size out"
    )
    with pytest.raises(ConfigError, match=r"; set train_batch_size=4$"):
        BatchSizes.solve(3, None, None, 4)
    with pytest.raises(ConfigError, match=r"; set train_batch_size=8 or 12$"):
        BatchSizes.solve(10, None, 2, 2)


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 4}])
def test_a_step_needs_a_size(config: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="neither train_batch_size nor train_micro_batch_size_per_gpu is given; add"):
        Config.load(config).batch_sizes(2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, -4, 1.5, True, "auto", [4]])
def test_a_size_is_a_positive_number(name: str, size: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*(got|wanted)"):
        Config.load({name: size})
