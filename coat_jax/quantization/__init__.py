"""Numbers in 8 bits: formats, arrays, range expansion, rounding, delayed scaling."""
