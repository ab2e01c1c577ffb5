"""Operations: which implementation runs, on which parts of arrays, and why.

An operation names the axes of its arrays (`operations`, `axes`). It runs as a kernel if
the target is a Hopper GPU (`devices`), on each device's part of arrays that are spread
over a mesh (`array_types`, `placement`, `parts`, `exchange`). A kernel is lowered once
in a process (`lowering`, `custom_calls`), without reshapes between kernels (`views`).
Programs that are only traced have stand-ins for kernels (`stand_ins`).
"""
