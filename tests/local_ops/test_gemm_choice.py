"""The products for which ``auto`` is Triton are those that it won in the committed results."""

import json
import re

from bench import records
from bench.gpu.sharded_gemm import PRODUCTS
from pipekernels.local_ops.gemm_choice import FASTER, MEASURED


def test_auto_is_triton_for_the_products_that_it_won_with_its_launch() -> None:
    record = json.loads((records.RESULTS / "nvidia-h200" / "gpu.sharded_gemm.json").read_text())
    assert record["machine"]["gpu"] == MEASURED
    notes = " ".join(row.get("note", "") for row in record["rows"])
    launch = 1e-6 * int(re.search(r"launch takes (\d+) us", notes)[1])
    medians: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        if "median" in row:
            medians.setdefault(row["case"], {})[row["candidate"]] = row["median"]
    faster = set()
    for case, seconds in medians.items():
        if seconds["cublas"] / max(seconds["triton"], launch) >= 1.03:
            product = PRODUCTS[case]
            faster.add(("bfloat16", product.way, product.m, product.n, product.k))
    assert len(medians) > 50 and faster == FASTER
