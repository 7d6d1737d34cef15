"""Against NCCL, on 2 to 8 GPUs: collectives, the row-parallel layer, pipes over real devices."""

BASE = ("NCCL", "Gloo", ".to")  # Gloo stands in NCCL's place on CPUs.
COLUMNS = ("size", "count", "redop", "algbw", "busbw", "wrong")
CONDITIONS = {
    "collectives and layer": "calls in a row on all ranks, the slowest rank's time per call; "
    "candidates in turn on the same tensors, medians; GB/s",
    "pipe": "forward and backward until all devices are idle, candidates in turn, medians",
    "wrong": "elements of all ranks' results, before and after",
}
