"""Search by what the task sees: galleries of images under a Distilled Riemannian Metric."""
