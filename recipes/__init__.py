"""Recipes that make the embedded models."""
