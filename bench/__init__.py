"""Measures mcc on CPUs beside PyTorch and JAX: `make bench`, described in docs/benchmarks/README.md."""
