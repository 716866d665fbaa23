"""Caching along one denoising trajectory: block lists, clock, history and the runner that joins them."""
