"""Procedural scenes with everything known about them."""
