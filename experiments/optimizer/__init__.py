"""What 8 bits do to an optimizer: errors, drift over many steps, training curves."""
