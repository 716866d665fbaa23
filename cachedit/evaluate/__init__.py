"""Measure what a cache costs: run pairs, quality metrics, and pages that show both."""
