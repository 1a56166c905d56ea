"""Networks that predict the task's geometry from features alone, and the targets they learn from."""
