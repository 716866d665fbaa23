"""Long seeded trials, which the suite runs in a short form and ``benchmarks/soak.py`` in full."""
