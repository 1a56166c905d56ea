"""Targets: what a head or an SPN learns from, computed from images and kept as Parquet."""
