"""Operations that need no other rank: splitting and joining micro-batches, copies between devices,
the sharded GEMM; and what it takes to register an operation. The public door is
:mod:`pipekernels.ops`."""
