"""Benchmarks of speed: `python -m experiments.benchmarks`, or `make bench`.

Each module has one or two benchmarks. A benchmark is a dataclass of its sizes (see `case.Benchmark`);
it lists its cases, and `__main__` measures them, prints a table and writes the results as JSON. Compare
the ratios of one run: absolute speeds also depend on what else the machine is doing.
"""
