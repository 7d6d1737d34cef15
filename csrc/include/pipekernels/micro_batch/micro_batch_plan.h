// Divides a MicroBatchCopy into tiles, the units of work of CPU threads and of CUDA thread blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/divisor.h"
#include "pipekernels/micro_batch/micro_batch.h"

namespace pipekernels {

// A strided copy of [outer 0, outer 1, rows, cols] units, cut into tiles of tile_rows x tile_cols.
// A unit is the widest power of two up to 16 bytes to which all addresses and strides are aligned.
// In a cast, a unit has one size in the source and another in the destination: it holds the
// elements that fill 16 bytes in the wider dtype if everything is aligned to that, or else one
// element. Strides are in bytes. Columns are the destination's fastest dimension; rows are the
// source's fastest dimension if that is a different one.
//
// All offsets within a tile are less than kTileExtent, and all numbers of tiles are below 2^31.
struct TiledCopy {
  const char* src;
  char* dst;
  int64_t src_outer[2], dst_outer[2];
  int64_t src_row, dst_row;
  int64_t src_col, dst_col;
  int64_t first_tile;  // tiles are numbered consecutively through all copies of a plan
  int32_t outer_size;
  Divisor inner_size, row_tiles, col_tiles;  // `inner` is outer dimension 1
  // The rows and columns of tiles, and of the last tiles, in blocks of `pack`.
  Divisor tile_rows, last_rows, tile_cols, last_cols;
  uint8_t src_unit, dst_unit;  // bytes
  DType from, to;              // dtypes of the source and the destination; equal: no cast
  bool transposed;             // rows are the source's fastest dimension, so tiles are read by rows
  // How many narrow units of a transposed copy fill 4 bytes, if both tensors can be accessed so
  // and tiles have whole blocks of pack x pack units; else 1.
  uint8_t pack;

  PK_HOST_DEVICE bool casts() const { return from != to; }
  int64_t tiles() const {
    return int64_t{outer_size} * inner_size.value * row_tiles.value * col_tiles.value;
  }
};

constexpr int64_t kTileExtent = int64_t{1} << 28;  // 32 bits hold a few steps beyond it

struct Tile {
  const char* src;
  char* dst;
  int32_t rows, cols;
  Divisor row_blocks, col_blocks;  // rows and cols, in blocks
};

// Tile `index` of the plan, which must belong to `copy`.
PK_HOST_DEVICE inline Tile tile_at(const TiledCopy& copy, int64_t index) {
  const auto number = static_cast<uint32_t>(index - copy.first_tile);
  const uint32_t above_cols = copy.col_tiles.quotient(number);
  const uint32_t above_rows = copy.row_tiles.quotient(above_cols);
  const uint32_t outer = copy.inner_size.quotient(above_rows);
  const uint32_t col_tile = number - above_cols * copy.col_tiles.value;
  const uint32_t row_tile = above_cols - above_rows * copy.row_tiles.value;
  const uint32_t inner = above_rows - outer * copy.inner_size.value;
  const int64_t row = int64_t{row_tile} * (copy.tile_rows.value * copy.pack);
  const int64_t col = int64_t{col_tile} * (copy.tile_cols.value * copy.pack);
  Tile tile;
  tile.src = copy.src + outer * copy.src_outer[0] + inner * copy.src_outer[1] + row * copy.src_row +
             col * copy.src_col;
  tile.dst = copy.dst + outer * copy.dst_outer[0] + inner * copy.dst_outer[1] + row * copy.dst_row +
             col * copy.dst_col;
  tile.row_blocks = row_tile + 1 == copy.row_tiles.value ? copy.last_rows : copy.tile_rows;
  tile.col_blocks = col_tile + 1 == copy.col_tiles.value ? copy.last_cols : copy.tile_cols;
  tile.rows = static_cast<int32_t>(tile.row_blocks.value * copy.pack);
  tile.cols = static_cast<int32_t>(tile.col_blocks.value * copy.pack);
  return tile;
}

// The position of the copy that contains tile `index`: the last one with first_tile <= index.
PK_HOST_DEVICE inline int copy_of_tile(const TiledCopy* copies, int count, int64_t index) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = low + (high - low) / 2;
    (copies[middle].first_tile <= index ? low : high) = middle;
  }
  return low;
}

// The most bytes in a tile of a plain and of a transposed copy. Full transposed tiles are square.
struct TileShape {
  int32_t run_bytes;
  int32_t transposed_bytes;
};

struct Plan {
  std::vector<TiledCopy> copies;  // none for empty tensors and microbatches
  int64_t tiles = 0;
  int64_t bytes = 0;  // casts count in the wider dtype
  bool casts = false;
};

// Throws std::invalid_argument if the request is inconsistent; see micro_batch.h.
Plan plan_tiles(const MicroBatchCopy& request, const TileShape& shape);

}  // namespace pipekernels
