"""What benchmarks have measured, as text: tables and plots of one, and the pages with all."""
