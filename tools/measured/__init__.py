"""What the pages under docs/results show, made from the files under benchmarks/results."""
