"""8-bit numbers: formats, arrays, range expansion, rounding, delayed scaling."""
