"""The optimizer's step inside the backward pass, so that gradients need no memory."""
