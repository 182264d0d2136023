"""Dropout rates that differ from block to block, by name: the masks of a report on adjusting dropout, and a line."""

NUM_BLOCKS = 12  # of the encoder that the masks are defined for

# The rates of the first blocks; the others have the usual one.
MASKS = {
    "mask1": (0.2,) * 4,
    "mask2": (0.3,) * 4,
    "mask3": (0.4,) * 4,
    "mask4": (0.5,) * 4,
    "mask5": (0.2,) * 6,
    "mask6": (0.3,) * 6,
    "mask7": (0.4,) * 6,
    "mask8": (0.5,) * 6,
    "mask9": (0.5, 0.4, 0.3, 0.2),
    "mask10": (0.4, 0.3, 0.2),
    "mask11": (0.3, 0.2),
    "mask12": (0.2,),
}


def scheduled(schedule: str, rates: tuple[float, ...], num_blocks: int) -> tuple[float, ...]:
    """A rate for each block.

    Args:
        schedule: `linear`, from the first to the last of two rates, or a mask's name.
        rates: the two ends of a line, or the one rate of the blocks that the mask does not name.
        num_blocks: of the encoder.

    Raises:
        ValueError: rates that the schedule has no use for, or a mask for an encoder of another depth than 12.
    """
    if schedule == "linear":
        if len(rates) != 2:
            raise ValueError(f"`linear` needs two rates, of the first block and of the last, not {rates}")
        first, last = rates
        return tuple(first + (last - first) * block / max(num_blocks - 1, 1) for block in range(num_blocks))
    if num_blocks != NUM_BLOCKS:
        raise ValueError(
            f"{schedule} is defined for {NUM_BLOCKS} blocks, and the encoder has {num_blocks}; use `linear`, or `none` "
            "with a list of rates"
        )
    if len(rates) != 1:
        raise ValueError(f"{schedule} needs one rate, of the blocks that it does not name, not {rates}")
    named = MASKS[schedule]
    return named + rates * (num_blocks - len(named))
