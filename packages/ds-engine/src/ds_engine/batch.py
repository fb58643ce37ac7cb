"""The batch-size identity: train_batch_size = micro-batch x accumulation x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ds_engine.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """The three sizes, which hold the identity.

    Attributes:
        train: samples a step takes in all.
        micro: samples a rank takes in one forward pass.
        accumulation: micro-batches a step.
    """

    train: int
    micro: int
    accumulation: int

    @classmethod
    def solve(cls, train: int | None, micro: int | None, accumulation: int | None, dp: int) -> BatchSizes:
        """Computes the sizes that are not given from those that are.

        With one of them missing it follows from the others; with `train` alone, accumulation is 1; with
        `micro` alone, accumulation is 1.

        Raises:
            ConfigError: nothing to compute from, or the given ones don't hold the identity.
        """
        if micro is not None:
            if accumulation is None and train is None:
                accumulation = 1
            if accumulation is None and train is not None:
                accumulation = _divide(train, micro * dp, "gradient_accumulation_steps", train, micro, None, dp)
            assert accumulation is not None
            computed = micro * accumulation * dp
            if train is not None and train != computed:
                raise ConfigError(_message(train, micro, accumulation, dp))
            return cls(computed, micro, accumulation)
        if train is None:
            raise ConfigError(
                "a step needs a batch size, and neither train_batch_size nor train_micro_batch_size_per_gpu is "
                "given; add train_micro_batch_size_per_gpu (samples of one forward pass on one rank)"
            )
        steps = accumulation or 1
        found = _divide(train, steps * dp, "train_micro_batch_size_per_gpu", train, None, steps, dp)
        return cls(train, found, steps)


def _divide(total: int, parts: int, name: str, train: int, micro: int | None, accumulation: int | None, dp: int) -> int:
    if total % parts or total < parts:
        raise ConfigError(_message(train, micro, accumulation, dp, missing=name))
    return total // parts


def _message(train: int, micro: int | None, accumulation: int | None, dp: int, missing: str = "") -> str:
    given = [f"train_batch_size={train}"]
    if micro is not None:
        given.append(f"train_micro_batch_size_per_gpu={micro}")
    if accumulation is not None:
        given.append(f"gradient_accumulation_steps={accumulation}")
    product = (micro or 1) * (accumulation or 1) * dp
    mends = []
    if missing:
        below = train // product * product
        problem = f"{train} is not a multiple of {product}, so {missing} can't be a whole number"
        mends.append(f"train_batch_size={f'{below} or ' if below else ''}{below + product}")
    else:
        problem = f"{micro} x {accumulation} x {dp} = {product}, not {train}"
        mends.append(f"train_batch_size={product}")
        if micro and train % (micro * dp) == 0:
            mends.append(f"gradient_accumulation_steps={train // (micro * dp)}")
        if accumulation and train % (accumulation * dp) == 0:
            mends.append(f"train_micro_batch_size_per_gpu={train // (accumulation * dp)}")
    return (
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks: "
        f"{', '.join(given)}, {dp} ranks: {problem}; set {', or '.join(mends)}"
        f"{', or leave train_batch_size out' if micro is not None else ''}"
    )
