"""The tables of `pullback.registry`, put back as they were after a test has added to them."""

from collections.abc import Iterator
from contextlib import contextmanager

from pullback import registry


@contextmanager
def kept_tables() -> Iterator[None]:
    """Restore the tables in place, since other modules may hold them, and forget which plugins were loaded."""
    backbones, decoders, scores = dict(registry.BACKBONES), list(registry.DECODERS), dict(registry.SCORES)
    registry.load_plugins.cache_clear()
    try:
        yield
    finally:
        for table, kept in ((registry.BACKBONES, backbones), (registry.SCORES, scores)):
            table.clear()
            table.update(kept)
        registry.DECODERS[:] = decoders
        registry.load_plugins.cache_clear()
