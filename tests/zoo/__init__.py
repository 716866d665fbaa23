"""Tiny denoisers and pipelines, built offline from configurations, that the tests run every strategy on."""
