"""Networks of our own. They import only torch."""
