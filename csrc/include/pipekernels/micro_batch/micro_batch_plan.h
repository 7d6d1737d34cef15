// Divides a MicroBatchCopy into tiles, the units of work of CPU threads and of CUDA thread blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "pipekernels/elements/dtype.h"
#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/micro_batch.h"

namespace pipekernels {

// A strided copy of [outer 0, outer 1, rows, cols] units, cut into tiles of tile_rows x tile_cols.
// A unit is the widest power of two up to 16 bytes to which all addresses and strides are aligned.
// In a cast, a unit has one size in the source and another in the destination: it holds the
// elements that fill 16 bytes in the wider dtype if everything is aligned to that, or else one
// element. Strides are in bytes. Columns are the destination's fastest dimension; rows are the
// source's fastest dimension if that is a different one.
struct TiledCopy {
  const char* src;
  char* dst;
  int64_t outer_size[2];
  int64_t src_outer[2], dst_outer[2];
  int64_t rows, cols;
  int64_t src_row, dst_row;
  int64_t src_col, dst_col;
  int64_t row_tiles, col_tiles;
  int64_t first_tile;  // tiles are numbered consecutively through all copies of a plan
  int32_t tile_rows, tile_cols;
  uint8_t src_unit, dst_unit;  // bytes
  DType from, to;              // dtypes of the source and the destination; equal: no cast
  int32_t transposed;          // rows are the source's fastest dimension, so tiles are read by rows

  PK_HOST_DEVICE bool casts() const { return from != to; }
  int64_t tiles() const { return outer_size[0] * outer_size[1] * row_tiles * col_tiles; }
};

struct Tile {
  const char* src;
  char* dst;
  int32_t rows, cols;
};

// Tile `index` of the plan, which must belong to `copy`.
PK_HOST_DEVICE inline Tile tile_at(const TiledCopy& copy, int64_t index) {
  index -= copy.first_tile;
  const int64_t col = index % copy.col_tiles * copy.tile_cols;
  index /= copy.col_tiles;
  const int64_t row = index % copy.row_tiles * copy.tile_rows;
  index /= copy.row_tiles;
  const int64_t inner = index % copy.outer_size[1];
  const int64_t outer = index / copy.outer_size[1];
  const int64_t rows_left = copy.rows - row, cols_left = copy.cols - col;
  return {copy.src + outer * copy.src_outer[0] + inner * copy.src_outer[1] + row * copy.src_row +
              col * copy.src_col,
          copy.dst + outer * copy.dst_outer[0] + inner * copy.dst_outer[1] + row * copy.dst_row +
              col * copy.dst_col,
          static_cast<int32_t>(rows_left < copy.tile_rows ? rows_left : copy.tile_rows),
          static_cast<int32_t>(cols_left < copy.tile_cols ? cols_left : copy.tile_cols)};
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
  std::vector<TiledCopy> copies;  // none for empty tensors and micro-batches
  int64_t tiles = 0;
  int64_t bytes = 0;  // casts count in the wider dtype
  bool casts = false;
};

// Throws std::invalid_argument if the request is inconsistent; see micro_batch.h.
Plan plan_tiles(const MicroBatchCopy& request, const TileShape& shape);

}  // namespace pipekernels
