"""Functions of other attention libraries, by their names and argument order, over attnops' ops.

A module per library: `flashinfer`, `flash_attn_interface`, `flash_mla`, `sgl_kernel`, `deep_gemm`, `fla`,
`causal_conv1d`; import the one that you replace. What they convert is tabled in docs/compat.md. An argument that is not
honoured raises NotImplementedError, which names it and what would work. Arguments that only choose among kernels or
hand over scratch memory are accepted.
Functions without a plan of their own make one per call, on the device, from torch's allocator. Nothing here waits for a
GPU unless its docstring says so.
"""
