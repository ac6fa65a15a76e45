"""What bench_kernels.py is made of: cases, workers, tables, a plot."""
