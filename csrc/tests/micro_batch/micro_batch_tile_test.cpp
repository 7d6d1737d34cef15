// The parts of tiles: divisors, the walks of threads, packed transposes, and addresses of tiles of
// tensors too large to allocate.
#include "pipekernels/micro_batch/micro_batch_tile.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "check.h"
#include "micro_batch_tiles.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"

namespace {

using namespace pipekernels;
using Integers = std::vector<int64_t>;
using Random = std::mt19937;

int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Moves every unit of every small table once, whatever the number of threads.
void test_move_units() {
  for (uint32_t cols = 1; cols <= 12; ++cols) {
    for (uint32_t rows = 1; rows <= 5; ++rows) {
      for (int32_t threads = 1; threads <= 40; ++threads) {
        std::vector<uint16_t> from(rows * cols), to(2 * rows * cols), times(2 * rows * cols);
        std::iota(from.begin(), from.end(), uint16_t{1});
        const auto* first = reinterpret_cast<const char*>(from.data());
        auto* target = reinterpret_cast<char*>(to.data());
        const auto load = [&](const char* place) {
          CHECK(place >= first && place < first + 2 * from.size());
          return load_unit<uint16_t>(place);
        };
        const auto store = [&](char* place, uint16_t unit) {
          to[(place - target) / 2] = unit;
          ++times[(place - target) / 2];
        };
        const auto columns = static_cast<int32_t>(cols), pitch = static_cast<int32_t>(4 * rows);
        for (int32_t thread = 0; thread < threads; ++thread) {
          move_units<uint16_t>({Divisor::by(rows), Divisor::by(cols)}, thread, threads,
                               Places<const char*>{first, 2 * columns, 2},
                               Places<char*>{target, 4, pitch}, load, store);
        }
        for (uint32_t row = 0; row < rows; ++row) {
          for (uint32_t col = 0; col < cols; ++col) {
            const uint32_t at = 2 * (col * rows + row);
            CHECK(to[at] == from[row * cols + col] && times[at] == 1);
            CHECK(times[at + 1] == 0);
          }
        }
      }
    }
  }
}

// Quotients change only at multiples of the divisor, so numbers beside these are enough.
void test_divisors() {
  constexpr uint32_t kLimit = uint32_t{1} << 31;
  const auto check = [&](uint32_t value) {
    const Divisor divisor = Divisor::by(value);
    const auto check_at = [&](uint64_t number) {
      if (number < kLimit) {
        CHECK(divisor.quotient(static_cast<uint32_t>(number)) == number / value);
      }
    };
    const uint64_t last = (kLimit - 1) / value;  // the largest quotient
    for (uint64_t i = 0; i <= 40; ++i) {
      for (const uint64_t quotient : {i, last / 2 + i, last - std::min(last, i)}) {
        check_at(quotient * value);
        check_at(quotient * value + value - 1);
      }
    }
    check_at(kLimit - 1);
  };
  for (uint32_t value = 1; value <= 70000; ++value) check(value);
  for (uint32_t power = 1 << 16; power != 0; power *= 2) {
    for (uint32_t i = 0; i <= 300; ++i) {
      check(power - 1 - i);
      if (power < kLimit) check(power + i);
    }
  }
  Random random(7);
  for (int i = 0; i < 20000; ++i) check(static_cast<uint32_t>(uniform(random, 1, kLimit - 1)));
  // All numbers, for divisors whose rounding is largest.
  for (const uint32_t value : {3u, 7u, 641u, 65537u, (1u << 30) + 1}) {
    const Divisor divisor = Divisor::by(value);
    for (uint32_t number = 0, quotient = 0, rest = 0; number < (1u << 22); ++number) {
      CHECK(divisor.quotient(number) == quotient);
      if (++rest == value) {
        rest = 0;
        ++quotient;
      }
    }
  }
}

// Transposed copies of 1 and 2 bytes: packed if sizes, strides and addresses allow it, and right in
// either case.
void test_packed_transposes() {
  Random random(3);
  int packed = 0, plain = 0;
  for (int round = 0; round < 2000; ++round) {
    const int64_t item = uniform(random, 1, 2), pack = 4 / item;
    const auto size = [&](int64_t most) {
      return uniform(random, 0, 3) == 0 ? uniform(random, 2, most * pack)
                                        : pack * uniform(random, 1, most);
    };
    const auto gap = [&] {
      return uniform(random, 0, 3) == 0 ? uniform(random, 0, 3) : pack * uniform(random, 0, 1);
    };
    const int64_t outer = uniform(random, 1, 3), rows = size(40), cols = size(9);
    const int64_t src_row = uniform(random, 0, 9) == 0 ? 2 : 1;
    const int64_t dst_col = uniform(random, 0, 9) == 0 ? 2 : 1;
    const int64_t src_col = rows * src_row + gap(), dst_row = cols * dst_col + gap();
    const int64_t src_outer = cols * src_col + gap(), dst_outer = rows * dst_row + gap();
    const int64_t src_at = gap(), dst_at = gap();
    alignas(4) static char source[4 * 400 * 100], target[sizeof(source)], expected[sizeof(source)];
    for (char& byte : source) byte = static_cast<char>(random());
    std::memset(target, 0, sizeof(target));
    std::memset(expected, 0, sizeof(expected));
    for (int64_t i = 0; i < outer * rows * cols; ++i) {
      const int64_t o = i / cols / rows, r = i / cols % rows, c = i % cols;
      std::memcpy(expected + item * (dst_at + o * dst_outer + r * dst_row + c * dst_col),
                  source + item * (src_at + o * src_outer + r * src_row + c * src_col), item);
    }
    MicroBatchCopy request{Direction::kSplit, 0, {outer}, {}, {}};
    request.wholes.push_back(
        {source + item * src_at, item, {outer, rows, cols}, {src_outer, src_row, src_col}});
    request.micro_batches.push_back({target + item * dst_at, {dst_outer, dst_row, dst_col}});
    const TileShape shape{256, 64 << uniform(random, 0, 4)};
    const Plan plan = plan_tiles(request, shape);
    int64_t misfit = rows | cols | src_col | dst_row | src_at | dst_at;
    if (outer > 1) misfit |= src_outer | dst_outer;
    CHECK(plan.copies.size() == 1 && plan.copies[0].transposed);
    const bool fits = misfit % pack == 0 && src_row == 1 && dst_col == 1;
    CHECK(plan.copies[0].pack == (fits ? pack : 1));
    ++(plan.copies[0].pack > 1 ? packed : plain);
    copy_by_tiles(plan, shape, static_cast<int>(uniform(random, 1, 40)));
    CHECK(std::memcmp(target, expected, sizeof(target)) == 0);
  }
  CHECK(packed > 200 && plain > 200);
}

// Tiles and strides beyond the limits of a copy: by addresses, without copying.
void test_limits_of_a_copy() {
  constexpr TileShape kShape{16 * 1024, 16 * 1024};
  const auto address = [](uintptr_t value) { return reinterpret_cast<char*>(value); };
  const uintptr_t whole = uintptr_t{1} << 50, part = uintptr_t{1} << 44;
  // Tiles of a few bytes each, more than 2^31 of them.
  const Integers shape{1 << 17, 1 << 16, 3, 2};
  const Integers strides{int64_t{13} << 17, 13, 4, 1};
  MicroBatchCopy request{Direction::kSplit, 0, {shape[0]}, {}, {}};
  request.wholes.push_back({address(whole), 1, shape, strides});
  request.micro_batches.push_back({address(part), {6 << 16, 6, 2, 1}});
  const Plan plan = plan_tiles(request, kShape);
  CHECK(plan.tiles > (int64_t{1} << 31) && plan.copies.size() > 1);
  const int count = static_cast<int>(plan.copies.size());
  int64_t bytes = 0;
  for (const TiledCopy& copy : plan.copies) {
    CHECK(copy.tiles() < (int64_t{1} << 31));
    const Tile first = tile_at(copy, copy.first_tile);
    bytes += copy.tiles() * first.rows * first.cols;
  }
  CHECK(bytes == plan.bytes);
  Random random(9);
  for (int i = 0; i < 2000; ++i) {
    const int64_t index = i == 0 ? plan.tiles - 1 : uniform(random, 0, plan.tiles - 1);
    const Tile tile = tile_at(plan.copies[copy_of_tile(plan.copies.data(), count, index)], index);
    int64_t place = tile.dst - address(part), source = 0;
    for (size_t d = shape.size(); d-- > 0; place /= shape[d])
      source += place % shape[d] * strides[d];
    CHECK(tile.src == address(whole) + source);
  }
  // Rows so far apart that few, or one, of them may be in a tile.
  for (const int64_t stride : {int64_t{1} << 25, (int64_t{1} << 25) + 4, int64_t{1} << 40}) {
    for (const bool transposed : {false, true}) {
      MicroBatchCopy far{Direction::kSplit, 0, {64}, {}, {}};
      far.wholes.push_back(
          {address(whole), 2, {64, 64}, transposed ? Integers{1, stride} : Integers{stride, 1}});
      far.micro_batches.push_back({address(part), {64, 1}});
      const Plan tiles = plan_tiles(far, kShape);
      CHECK(tiles.copies.size() == 1 && tiles.tiles >= 64 / 2);
      const TiledCopy& copy = tiles.copies[0];
      const Tile tile = tile_at(copy, 0);
      CHECK((tile.rows - 1) * copy.src_row + (tile.cols - 1) * copy.src_col < kTileExtent);
      const Tile last = tile_at(copy, tiles.tiles - 1);
      CHECK(last.src + (last.rows - 1) * copy.src_row + (last.cols - 1) * copy.src_col ==
            address(whole) + 2 * 63 * (stride + 1) + 2 - copy.src_unit);
    }
  }
}

// Compares addresses of tiles, without copying, for tensors too large to allocate.
void test_offsets_beyond_32_bits() {
  constexpr TileShape kShape{16 * 1024, 16 * 1024};
  constexpr int64_t kRows = int64_t{1} << 20, kCols = 3 << 13;  // 96 GiB of float32
  const auto address = [](uintptr_t value) { return reinterpret_cast<char*>(value); };
  const uintptr_t whole = uintptr_t{1} << 40, parts = uintptr_t{1} << 44;
  constexpr int64_t kBytes = 4 * kRows * kCols;
  for (const int64_t dim : {0, 1}) {
    const bool transposed = dim == 1;  // the whole tensor is column-major
    const Integers strides = transposed ? Integers{1, kRows} : Integers{kCols, 1};
    MicroBatchCopy request{Direction::kSplit, dim, {}, {}, {}};
    request.sizes.assign(3, (dim == 0 ? kRows : kCols) / 3);
    request.sizes[0] += dim == 0 ? kRows % 3 : 0;
    request.wholes.push_back({address(whole), 4, {kRows, kCols}, strides});
    int64_t before = 0;
    for (const int64_t size : request.sizes) {
      request.micro_batches.push_back(
          {address(parts + 4 * before * (dim == 0 ? kCols : kRows)), {dim == 0 ? kCols : size, 1}});
      before += size;
    }
    const Plan plan = plan_tiles(request, kShape);
    CHECK(plan.bytes == kBytes);
    CHECK(plan.copies.size() == 3);
    Random random(5);
    for (int i = 0; i < 2000; ++i) {
      const int64_t index =
          i == 0 ? 0 : (i == 1 ? plan.tiles - 1 : uniform(random, 0, plan.tiles - 1));
      const int number = copy_of_tile(plan.copies.data(), 3, index);
      const TiledCopy& copy = plan.copies[number];
      CHECK(copy.transposed == transposed);
      const Tile tile = tile_at(copy, index);
      // The position of the tile's first element in its microbatch, and from that in the whole.
      const int64_t begin =
          std::accumulate(request.sizes.begin(), request.sizes.begin() + number, int64_t{0});
      const int64_t width = dim == 0 ? kCols : request.sizes[number];
      const int64_t place = (tile.dst - request.micro_batches[number].data) / 4;
      const int64_t row = place / width + (dim == 0 ? begin : 0);
      const int64_t col = place % width + (dim == 1 ? begin : 0);
      CHECK(row >= 0 && row < kRows && col >= 0 && col < kCols);
      CHECK(tile.src == address(whole) + 4 * (row * strides[0] + col * strides[1]));
      if (index == plan.tiles - 1) {
        const int64_t last = (tile.rows - 1) * copy.dst_row + (tile.cols - 1) * copy.dst_col;
        CHECK(reinterpret_cast<uintptr_t>(tile.dst) + last + copy.dst_unit == parts + kBytes);
      }
    }
  }
}

}  // namespace

int main() {
  test_move_units();
  test_divisors();
  test_packed_transposes();
  test_limits_of_a_copy();
  test_offsets_beyond_32_bits();
}
