// The parts of CUDA collectives without synchronisation: division into chunks, rounding of
// elements, and the choice of the algorithm.

#include "pipekernels/collectives/device_chunks.h"

#include <algorithm>
#include <random>

#include "check.h"
#include "pipekernels/collectives/all_reduce_launch.cuh"
#include "pipekernels/elements/device_elements.h"
#include "pipekernels/elements/reduce.h"

namespace {

using namespace pipekernels;

// Every element is in exactly one chunk of one block and in one rank's part of it, in order.
void test_chunks() {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const size_t size = size_t{1} << random() % 4;
    const size_t count = random() % (random() % 3 ? 5000 : 50);
    const size_t limit = 64 * (1 + random() % 20), least = random() % 2000;
    const int most = 1 + random() % 9, parts = 1 + random() % 9;
    const DeviceGrid grid = plan_grid(count, size, limit, least, most);
    CHECK(1 <= grid.blocks && grid.blocks <= most);
    CHECK(grid.chunk * size <= limit && grid.chunk * size % 64 == 0);
    CHECK(count <= grid.chunk || grid.chunk * size >= std::min(least, limit / 64 * 64));
    DeviceLaunch launch{};
    launch.count = count;
    launch.chunk = grid.chunk;
    launch.blocks = grid.blocks;
    size_t next = 0, most_rounds = 0, least_rounds = count + 1;
    for (int block = 0; block < grid.blocks; ++block) {
      const size_t rounds = Chunks(launch, block).rounds();
      most_rounds = std::max(most_rounds, rounds);
      least_rounds = std::min(least_rounds, rounds);
    }
    CHECK(most_rounds - least_rounds <= 1 && (least_rounds >= 1 || count == 0));
    for (size_t round = 0; round < most_rounds; ++round) {
      for (int block = 0; block < grid.blocks; ++block) {
        const Chunks chunks(launch, block);
        if (round >= chunks.rounds()) continue;
        const ChunkRange chunk = chunks(round);
        CHECK(chunk.begin == next && chunk.count >= 1 && chunk.count <= grid.chunk);
        for (int part = 0; part < parts; ++part) {
          const ChunkRange range = part_of(chunk, part, parts, size);
          CHECK(range.begin == next && (range.begin * size % 16 == 0 || range.count == 0));
          next += range.count;
        }
        CHECK(next == chunk.begin + chunk.count);
      }
    }
    CHECK(next == count);
  }
}

// Rounds as the CPU's kernels do: all 16-bit floats, floats near them, and midpoints between them.
template <class Type>
void test_conversions(DType dtype) {
  // A maximum with the lowest value returns the other term, also if that is NaN.
  const ReduceKernels& kernels = reduce_kernels(dtype, Reduction::kMax, Isa::kBaseline);
  const uint16_t lowest = dtype == DType::kFloat16 ? 0xfc00 : 0xff80;
  alignas(64) float partial[32] = {};
  alignas(64) uint16_t source[32] = {lowest}, expected[32];
  for (uint32_t x = 0; x < 1 << 16; ++x) {
    const float wide = Type::widen(static_cast<uint16_t>(x));
    for (const uint32_t offset : {0u, 1u, ~0u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u}) {
      partial[0] = bits_as<float>(bits_as<uint32_t>(wide) + offset);
      kernels.finish(expected, partial, source, 2, 32, 1);
      CHECK(Type::narrow(partial[0]) == expected[0]);
    }
    if (wide == wide) CHECK(Type::narrow(wide) == x);
  }
}

void test_algorithm_choice() {
  for (int ranks = 2; ranks <= kMaxDeviceRanks; ++ranks) {
    CHECK(choose_device_algorithm(0, ranks) == Algorithm::kOneShot);
    CHECK(choose_device_algorithm(64 << 20, ranks) == Algorithm::kTwoShot);
  }
}

}  // namespace

int main() {
  test_chunks();
  test_conversions<Fp16Element>(DType::kFloat16);
  test_conversions<Bf16Element>(DType::kBFloat16);
  test_algorithm_choice();
}
