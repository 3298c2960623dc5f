"""Ways to send fewer bytes between replicas (ZeRO 0) than an all-reduce of gradients.

    lpkit train cpu-3m --import lessons.rows.reductions --processes 2 parallel.data=2 \\
        parallel.zero=0 parallel.reduction=bits-4

Compression sends an approximation of each gradient and adds the error to the next gradient (error
feedback). The other methods send no gradients: each rank updates its own weights, and ranks average
weights every few updates (local SGD, DiLoCo) or with neighbours after each update (gossip).
"""

import math
from functools import partial

from lpkit.techniques.layouts import REDUCTIONS, Reduction

HERE = "lessons.rows.reductions_torch:"
BLOCK = 256             # elements that share a scale of 4 bytes
INDEXED = 8             # bytes of a float32 value and its int32 index
MIB_25 = 25 << 20


def top_count(share: float, numbers: int) -> int:
    """Return the number of elements that top-k sends of a message of `numbers` elements."""
    return max(1, int(share * numbers))


def coded_bytes(bits: int, numbers: int) -> int:
    """Return the bytes of `numbers` codes of `bits` bits in whole blocks, with one float32 scale
    per block."""
    blocks = -(-numbers // BLOCK)
    return blocks * (BLOCK * bits // 8 + 4)


def sign_bytes(numbers: int) -> int:
    """Return the bytes of one bit per number and one float32 scale."""
    return -(-numbers // 8) + 4


def is_matrix(shape: tuple[int, ...], rank: int) -> bool:
    """Return whether PowerSGD compresses a parameter of this shape."""
    return len(shape) == 2 and min(shape) > rank


def _gathered(nbytes, shape, ranks, itemsize) -> float:
    """Return the bytes that a rank sends if its message goes to every other rank. The functions
    below that take a shape return the bytes that a rank sends per update, too."""
    return (ranks - 1) * nbytes(math.prod(shape))


def _all_reduced(shape, ranks, itemsize, every=1) -> float:
    return 2 * (ranks - 1) / ranks * itemsize * math.prod(shape) / every


def _powersgd(rank, shape, ranks, itemsize) -> float:
    """PowerSGD all-reduces two factors, (rows, rank) and (columns, rank), of a matrix, and the
    gradient itself of a vector."""
    numbers = (sum(shape) * rank,) if is_matrix(shape, rank) else shape
    return _all_reduced(numbers, ranks, 4)


def _gossip(neighbours, shape, ranks, itemsize) -> float:
    return neighbours * itemsize * math.prod(shape)


TOP_K = "Lin et al. 2017, Deep Gradient Compression, https://arxiv.org/abs/1712.01887"
REDUCTIONS |= {
    "top-k-0.01": Reduction(
        why="the largest 1% of the gradient's numbers, with error feedback", source=TOP_K,
        bucket_bytes=0, sent=partial(_gathered, lambda n: INDEXED * top_count(0.01, n)),
        implementation=HERE + "top_k_1_percent"),
    "top-k-0.001": Reduction(
        why="the largest 0.1% of the gradient's numbers, with error feedback", source=TOP_K,
        bucket_bytes=0, sent=partial(_gathered, lambda n: INDEXED * top_count(0.001, n)),
        implementation=HERE + "top_k_01_percent"),
    "bits-8": Reduction(
        why="8 bits per number and a scale for 256, with error feedback",
        source="Dettmers 2015, https://arxiv.org/abs/1511.04561",
        bucket_bytes=MIB_25, sent=partial(_gathered, partial(coded_bytes, 8)),
        implementation=HERE + "bits_8"),
    "bits-4": Reduction(
        why="4 bits per number and a scale for 256, with error feedback",
        source="Alistarh et al. 2016, QSGD, https://arxiv.org/abs/1610.02132",
        bucket_bytes=MIB_25, sent=partial(_gathered, partial(coded_bytes, 4)),
        implementation=HERE + "bits_4"),
    "sign": Reduction(
        why="one bit per number and a scale for a parameter, with error feedback",
        source="Karimireddy et al. 2019, EF-SignSGD, https://arxiv.org/abs/1901.09847",
        bucket_bytes=0, sent=partial(_gathered, sign_bytes),
        implementation=HERE + "sign"),
    "powersgd-4": Reduction(
        why="two factors of rank 4 per matrix, with error feedback",
        source="Vogels et al. 2019, PowerSGD, https://arxiv.org/abs/1905.13727",
        bucket_bytes=0, sent=partial(_powersgd, 4), implementation=HERE + "powersgd_4"),
    "local-10": Reduction(
        why="each rank updates its own weights; every 10 updates ranks average them",
        source="Stich 2018, Local SGD, https://arxiv.org/abs/1805.09767",
        bucket_bytes=MIB_25, sent=partial(_all_reduced, every=10),
        implementation=HERE + "local_10"),
    "diloco-10": Reduction(
        why="local-10, and an outer step with rate 0.7 and Nesterov momentum 0.5",
        source="Douillard et al. 2023, DiLoCo, https://arxiv.org/abs/2311.08105",
        bucket_bytes=MIB_25, sent=partial(_all_reduced, every=10),
        implementation=HERE + "diloco_10"),
    "gossip-ring": Reduction(
        why="after each update a rank averages its weights with its two neighbours on a ring",
        source="Lian et al. 2017, D-PSGD, https://arxiv.org/abs/1705.09056",
        bucket_bytes=MIB_25, sent=partial(_gossip, 2),
        implementation=HERE + "gossip_ring"),
    "gossip-exponential": Reduction(
        why="after update t a rank averages its weights with those of the rank 2^(t mod log2 n) "
            "places before it",
        source="Ying et al. 2021, https://arxiv.org/abs/2110.13363",
        bucket_bytes=MIB_25, sent=partial(_gossip, 1),
        implementation=HERE + "gossip_exponential"),
}
