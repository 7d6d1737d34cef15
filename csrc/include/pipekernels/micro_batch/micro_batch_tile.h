// How the threads of a CUDA block copy or cast one tile of a plan. The tests call the same
// functions on the CPU, for one thread index after the other.
#pragma once

#include <cstdint>

#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"
#include "pipekernels/micro_batch/micro_batch_unit.h"

namespace pipekernels {

// Iterates over every `step`-th cell of a table with `cols` columns, row by row, from cell `first`.
// Divides only in the constructor: with a division per cell, a GPU would be limited by arithmetic
// instead of memory.
struct StridedCell {
  int32_t row, col;

  PK_HOST_DEVICE StridedCell(int32_t first, int32_t step, int32_t cols)
      : row(first / cols),
        col(first % cols),
        cols_(cols),
        step_rows_(step / cols),
        step_cols_(step % cols) {}

  PK_HOST_DEVICE void advance() {
    row += step_rows_;
    col += step_cols_;
    if (col >= cols_) {
      col -= cols_;
      ++row;
    }
  }

 private:
  int32_t cols_, step_rows_, step_cols_;
};

// Calls write(row, col, read(row, col)) for one thread's share of a table of units, with several
// reads in flight before the first write. Neighbouring threads take neighbouring columns, so their
// accesses coalesce.
template <typename Unit, typename Read, typename Write>
PK_HOST_DEVICE inline void move_units(int32_t rows, int32_t cols, int32_t thread, int32_t threads,
                                      const Read& read, const Write& write) {
  constexpr int kInFlight = 4;
  StridedCell reading(thread, threads, cols), writing = reading;
  while (reading.row < rows) {
    Unit held[kInFlight];
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k, reading.advance()) {
      if (reading.row < rows) held[k] = read(reading.row, reading.col);
    }
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k, writing.advance()) {
      if (writing.row < rows) write(writing.row, writing.col, held[k]);
    }
  }
}

// Copies a tile that is not transposed directly from source to destination.
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void copy_rows(const TiledCopy& copy, const Tile& tile, int32_t thread,
                                     int32_t threads) {
  move_units<Unit>(
      tile.rows, tile.cols, thread, threads,
      [&](int32_t row, int32_t col) {
        return load_unit<Unit>(tile.src + row * copy.src_row + col * copy.src_col);
      },
      [&](int32_t row, int32_t col, const Unit& unit) {
        char* place = tile.dst + row * copy.dst_row + col * copy.dst_col;
        store_maybe_cast<kCasts>(copy, place, unit);
      });
}

// A transposed copy reads along the source's fastest dimension and writes along the destination's.
// In between, the tile is staged in shared memory, column after column. An odd pitch puts
// neighbouring units of a row into different banks of shared memory.
PK_HOST_DEVICE inline int32_t staged_pitch(const Tile& tile) { return tile.rows | 1; }

// The shared memory for a staged tile of up to `tile_bytes`. Padding adds at most half, since a
// padded tile has at least two rows.
PK_HOST_DEVICE constexpr int32_t staged_bytes(int32_t tile_bytes) {
  return tile_bytes + tile_bytes / 2;
}

template <typename Unit>
PK_HOST_DEVICE inline void stage_columns(const TiledCopy& copy, const Tile& tile, Unit* staged,
                                         int32_t thread, int32_t threads) {
  const int32_t pitch = staged_pitch(tile);
  move_units<Unit>(
      tile.cols, tile.rows, thread, threads,
      [&](int32_t col, int32_t row) {
        return load_unit<Unit>(tile.src + row * copy.src_row + col * copy.src_col);
      },
      [&](int32_t col, int32_t row, const Unit& unit) { staged[col * pitch + row] = unit; });
}

// Call after all threads of the block have finished stage_columns().
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void write_rows(const TiledCopy& copy, const Tile& tile, const Unit* staged,
                                      int32_t thread, int32_t threads) {
  const int32_t pitch = staged_pitch(tile);
  move_units<Unit>(
      tile.rows, tile.cols, thread, threads,
      [&](int32_t row, int32_t col) { return staged[col * pitch + row]; },
      [&](int32_t row, int32_t col, const Unit& unit) {
        char* place = tile.dst + row * copy.dst_row + col * copy.dst_col;
        store_maybe_cast<kCasts>(copy, place, unit);
      });
}

}  // namespace pipekernels
