"""The grid of blocks on a canvas: where the output's blocks begin, and how many masks fill them.

Blocks count from the first output position or, for block-causal models, from column 0: there the prompt's tail shares
a block with the first tokens of the answer, as the models were trained. Numbers only.
"""

from typing import NamedTuple


class Grid(NamedTuple):
    block_length: int
    block_causal: bool

    def start(self, output_start: int) -> int:
        """Column where the first output position's block begins."""
        return output_start - output_start % self.block_length if self.block_causal else output_start

    def num_blocks(self, output_start: int, num_tokens: int) -> int:
        """Blocks that hold any of `num_tokens` output positions."""
        return -(-(output_start + num_tokens - self.start(output_start)) // self.block_length)

    def num_masks(self, output_start: int, num_tokens: int) -> int:
        """`num_tokens` rounded up so that the last block is whole."""
        end = self.start(output_start) + self.num_blocks(output_start, num_tokens) * self.block_length
        return end - output_start

    def most_masks(self, output_start: int, room: int) -> int:
        """The most masks in whole blocks that `room` columns hold; 0 where not one block ends in them."""
        start = self.start(output_start)
        end = start + (output_start + room - start) // self.block_length * self.block_length
        return max(0, end - output_start)
