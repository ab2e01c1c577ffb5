"""8-bit numbers: formats, arrays, groups, expansion, rounding, delayed scaling."""
