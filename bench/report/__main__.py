"""``python -m bench.report``: rewrites the pages and plots from the result files."""

from bench.report.pages import main

main()
