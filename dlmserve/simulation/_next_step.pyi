"""csrc/next_step.c; there where a compiler was."""

Tables = object  # opaque; the arrays must live as long

def tables(num_rows: int, length: int, num_knots: int, *addresses: int) -> Tables:
    """Of `Unmasking`'s arrays own, fresh, places, shifts (float32), knots, logits (float64), all contiguous.

    Raises ValueError for blocks of more than 32 tokens, and for fewer than two knots.
    """

def next_step(
    tables: Tables, own_row: int, noise_row: int, masked: int, ease: float, cut: float
) -> tuple[list[int], list[float], int]:
    """Positions that are unmasked, their confidences, and what is still masked.

    Raises ValueError for rows that there are not, for no mask, and for one outside the block.
    """
