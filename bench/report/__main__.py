"""``python -m bench.report``: rewrites every page, and the plots that pages show."""

import re

from bench import records, registry
from bench.report import pages

for page, text in pages.rewritten().items():
    page.write_text(text)
    for link in re.findall(r"\]\(((?:\.\./)*bench/results/\S+\.svg)\)", text):
        path = (page.parent / link).resolve()
        record = records.read(path.with_suffix(".json"))
        registry.find(record["name"]).plot(record["rows"], path)
