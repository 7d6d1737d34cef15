// Copies by the tile functions of CUDA blocks, on the CPU.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"
#include "pipekernels/micro_batch/micro_batch_tile.h"

namespace pipekernels {

template <typename Unit>
void copy_tile(const TiledCopy& copy, const Tile& tile, std::vector<char>& memory, int threads) {
  if (!copy.transposed) {
    for (int i = 0; i < threads; ++i) {
      copy.casts() ? copy_rows<Unit, true>(copy, tile, i, threads)
                   : copy_rows<Unit, false>(copy, tile, i, threads);
    }
    return;
  }
  std::fill(memory.begin(), memory.end(), '\x5a');
  if constexpr (sizeof(Unit) < 4) {
    constexpr int kPack = 4 / sizeof(Unit);
    if (copy.pack > 1) {
      CHECK(copy.pack == kPack && size_t{kPack} * part_bytes(tile) <= memory.size());
      for (int i = 0; i < threads; ++i) stage_packed<kPack>(copy, tile, memory.data(), i, threads);
      for (int i = 0; i < threads; ++i) write_packed<kPack>(copy, tile, memory.data(), i, threads);
      return;
    }
  }
  CHECK(copy.pack == 1);
  CHECK(((tile.cols - 1) * staged_pitch(tile) + tile.rows) * sizeof(Unit) <= memory.size());
  for (int i = 0; i < threads; ++i) stage_columns<Unit>(copy, tile, memory.data(), i, threads);
  for (int i = 0; i < threads; ++i) {
    copy.casts() ? write_rows<Unit, true>(copy, tile, memory.data(), i, threads)
                 : write_rows<Unit, false>(copy, tile, memory.data(), i, threads);
  }
}

// Copies a plan tile by tile as CUDA blocks do, one thread after the other.
inline void copy_by_tiles(const Plan& plan, const TileShape& shape, int threads) {
  const int count = static_cast<int>(plan.copies.size());
  std::vector<char> memory(staged_bytes(shape.transposed_bytes));
  int64_t bytes = 0;
  for (int64_t index = 0; index < plan.tiles; ++index) {
    const TiledCopy& copy = plan.copies[copy_of_tile(plan.copies.data(), count, index)];
    const Tile tile = tile_at(copy, index);
    CHECK(tile.rows >= 1 && tile.cols >= 1);
    CHECK(std::max((tile.rows - 1) * copy.src_row + (tile.cols - 1) * copy.src_col,
                   (tile.rows - 1) * copy.dst_row + (tile.cols - 1) * copy.dst_col) < kTileExtent);
    const int64_t tile_bytes =
        static_cast<int64_t>(tile.rows) * tile.cols * std::max(copy.src_unit, copy.dst_unit);
    CHECK(tile_bytes <= (copy.transposed ? shape.transposed_bytes : shape.run_bytes));
    for (int32_t r = 0; r < tile.rows; ++r) {
      for (int32_t c = 0; c < tile.cols; ++c) {
        const char* src = tile.src + r * copy.src_row + c * copy.src_col;
        const char* dst = tile.dst + r * copy.dst_row + c * copy.dst_col;
        CHECK(reinterpret_cast<uintptr_t>(src) % copy.src_unit == 0);
        CHECK(reinterpret_cast<uintptr_t>(dst) % copy.dst_unit == 0);
      }
    }
    bytes += tile_bytes;
    CHECK(plan.casts || !copy.casts());
    switch (copy.src_unit) {
      case 1:
        copy_tile<uint8_t>(copy, tile, memory, threads);
        break;
      case 2:
        copy_tile<uint16_t>(copy, tile, memory, threads);
        break;
      case 4:
        copy_tile<uint32_t>(copy, tile, memory, threads);
        break;
      case 8:
        copy_tile<uint64_t>(copy, tile, memory, threads);
        break;
      default:
        copy_tile<Unit16>(copy, tile, memory, threads);
        break;
    }
  }
  CHECK(bytes == plan.bytes);  // with a correct result, this means every unit is copied once
}

}  // namespace pipekernels
