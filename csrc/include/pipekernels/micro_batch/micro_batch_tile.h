// How the threads of a CUDA block copy, or cast, one tile of a plan. On the CPU the same functions
// run thread after thread, in the tests.
#pragma once

#include <cstdint>

#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"
#include "pipekernels/micro_batch/micro_batch_unit.h"

namespace pipekernels {

// Every `step`-th place of a table with so many columns, row by row, from place `first` on. Divides
// only to begin: with a division per place, a GPU would be limited by arithmetic and not by memory.
struct Walk {
  int32_t row, col;

  PK_HOST_DEVICE Walk(int32_t first, int32_t step, int32_t cols)
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

// One thread's share of a table of units: write(row, col, read(row, col)), several reads being
// under way before the first write. Neighbouring threads have neighbouring columns, so accesses
// coalesce.
template <typename Unit, typename Read, typename Write>
PK_HOST_DEVICE inline void move_units(int32_t rows, int32_t cols, int32_t thread, int32_t threads,
                                      const Read& read, const Write& write) {
  constexpr int kInFlight = 4;
  Walk reading(thread, threads, cols), writing = reading;
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

// Straight from source to destination, for copies that are not transposed.
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
        store_arriving<kCasts>(copy, place, unit);
      });
}

// A transposed copy reads along the source's fastest dimension and writes along the destination's.
// In between the tile is staged, column after column; an odd distance between columns puts
// neighbours of a row into different banks of shared memory.
PK_HOST_DEVICE inline int32_t staged_pitch(const Tile& tile) { return tile.rows | 1; }

// For staged tiles of at most so many bytes: they have two rows at least or need no padding, so it
// is at most half as much again.
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

// After all threads have staged.
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void write_rows(const TiledCopy& copy, const Tile& tile, const Unit* staged,
                                      int32_t thread, int32_t threads) {
  const int32_t pitch = staged_pitch(tile);
  move_units<Unit>(
      tile.rows, tile.cols, thread, threads,
      [&](int32_t row, int32_t col) { return staged[col * pitch + row]; },
      [&](int32_t row, int32_t col, const Unit& unit) {
        char* place = tile.dst + row * copy.dst_row + col * copy.dst_col;
        store_arriving<kCasts>(copy, place, unit);
      });
}

}  // namespace pipekernels
