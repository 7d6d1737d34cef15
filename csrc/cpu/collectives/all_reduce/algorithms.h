// The algorithms of all_reduce() on CPUs, for the ranks of one host.
#pragma once

#include <cstddef>
#include <vector>

#include "pipekernels/collectives/communicator.h"
#include "pipekernels/elements/reduce.h"

namespace pipekernels {

// The tensor of this rank, and the kernels that reduce it.
struct Operand {
  std::byte* data;
  size_t count;
  size_t element_size;
  size_t partial_size;
  Reduction reduction;
  const ReduceKernels& kernels;

  std::byte* at(size_t element) const { return data + element * element_size; }

  void reduce(void* destination, const std::vector<const void*>& sources, size_t elements) const {
    kernels.reduce(destination, sources.data(), static_cast<int>(sources.size()), elements);
  }
  void reduce_in_place(const std::vector<void*>& tensors, int rank, size_t elements) const {
    kernels.reduce_in_place(tensors.data(), static_cast<int>(tensors.size()), rank, elements);
  }
};

void one_shot(Collective& collective, const Operand& operand);
// For tensors of one block on few ranks.
void one_shot_or_in_place(Collective& collective, const Operand& operand);
void two_shot(Collective& collective, const Operand& operand);
// What is left of two_shot() after its first step if peers can access all ranks' tensors.
void two_shot_in_place(Collective& collective, const Operand& operand);
void ring(Collective& collective, const Operand& operand);

}  // namespace pipekernels
