"""The experiments of the paper: listed settings, one row of results per run."""
