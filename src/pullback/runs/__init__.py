"""What every long job shares: folders, settings, rows, atomic writes, provenance, progress. Without torch."""
