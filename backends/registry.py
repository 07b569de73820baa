"""Which engines the product can drive: the one table of adapters."""
