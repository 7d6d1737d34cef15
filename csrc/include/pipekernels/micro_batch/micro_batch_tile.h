// How the threads of a CUDA block copy or cast one tile of a plan. The tests call the same
// functions on the CPU, for one thread index after the other.
#pragma once

#include <cstdint>

#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"
#include "pipekernels/micro_batch/micro_batch_unit.h"

namespace pipekernels {

// Where the units of a table are: that of row r and column c at first + r * row + c * col.
template <typename Pointer>
struct Places {
  Pointer first;
  int64_t row, col;  // bytes

  PK_HOST_DEVICE int64_t offset(int32_t r, int32_t c) const { return r * row + c * col; }
};

// Moves one thread's share of a table of units, every `threads`-th one row by row: write(place,
// unit) with the unit at the same place of `from`. Several loads are in flight before the first
// write. Neighbouring threads take neighbouring columns, so their accesses coalesce. Pointers step
// from unit to unit, as products of 64 bits or a division would limit a GPU by arithmetic.
template <typename Unit, bool kOneRow, typename From, typename To, typename Write>
PK_HOST_DEVICE inline void move_share(int32_t rows, int32_t cols, int32_t thread, int32_t threads,
                                      const Places<From>& from, const Places<To>& to,
                                      const Write& write) {
  constexpr int kInFlight = 4;
  const int32_t step_rows = kOneRow ? 0 : threads / cols;
  const int32_t step_cols = kOneRow ? threads : threads % cols;
  const int32_t row = kOneRow ? 0 : thread / cols;
  int32_t col = kOneRow ? thread : thread % cols;
  From src = from.first + from.offset(row, col);
  To dst = to.first + to.offset(row, col);
  const int64_t src_step = from.offset(step_rows, step_cols), src_wrap = from.offset(1, -cols);
  const int64_t dst_step = to.offset(step_rows, step_cols), dst_wrap = to.offset(1, -cols);
  int32_t left = (rows * cols - thread + threads - 1) / threads;
  for (; left > 0; left -= kInFlight) {
    Unit held[kInFlight];
    To places[kInFlight];
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (k < left) held[k] = load_unit<Unit>(src);
      places[k] = dst;
      src += src_step;
      dst += dst_step;
      if constexpr (!kOneRow) {
        col += step_cols;
        if (col >= cols) {
          col -= cols;
          src += src_wrap;
          dst += dst_wrap;
        }
      }
    }
    PK_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (k < left) write(places[k], held[k]);
    }
  }
}

template <typename Unit, typename From, typename To, typename Write>
PK_HOST_DEVICE inline void move_units(int32_t rows, int32_t cols, int32_t thread, int32_t threads,
                                      const Places<From>& from, const Places<To>& to,
                                      const Write& write) {
  if (rows == 1) {
    move_share<Unit, true>(rows, cols, thread, threads, from, to, write);
  } else {
    move_share<Unit, false>(rows, cols, thread, threads, from, to, write);
  }
}

// Copies a tile that is not transposed directly from source to destination.
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void copy_rows(const TiledCopy& copy, const Tile& tile, int32_t thread,
                                     int32_t threads) {
  const Places<const char*> from{tile.src, copy.src_row, copy.src_col};
  const Places<char*> to{tile.dst, copy.dst_row, copy.dst_col};
  move_units<Unit>(
      tile.rows, tile.cols, thread, threads, from, to,
      [&](char* place, const Unit& unit) { store_maybe_cast<kCasts>(copy, place, unit); });
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

// The places of a staged tile, by rows and columns of the tile.
template <typename Unit, typename Pointer>
PK_HOST_DEVICE inline Places<Pointer> staged_places(const Tile& tile, Pointer staged) {
  return {staged, sizeof(Unit), static_cast<int64_t>(sizeof(Unit)) * staged_pitch(tile)};
}

template <typename Unit>
PK_HOST_DEVICE inline void stage_columns(const TiledCopy& copy, const Tile& tile, Unit* staged,
                                         int32_t thread, int32_t threads) {
  const auto to = staged_places<Unit>(tile, reinterpret_cast<char*>(staged));
  move_units<Unit>(tile.cols, tile.rows, thread, threads,
                   Places<const char*>{tile.src, copy.src_col, copy.src_row},
                   Places<char*>{to.first, to.col, to.row},
                   [](char* place, const Unit& unit) { *reinterpret_cast<Unit*>(place) = unit; });
}

// Call after all threads of the block have finished stage_columns().
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void write_rows(const TiledCopy& copy, const Tile& tile, const Unit* staged,
                                      int32_t thread, int32_t threads) {
  move_units<Unit>(
      tile.rows, tile.cols, thread, threads,
      staged_places<Unit>(tile, reinterpret_cast<const char*>(staged)),
      Places<char*>{tile.dst, copy.dst_row, copy.dst_col},
      [&](char* place, const Unit& unit) { store_maybe_cast<kCasts>(copy, place, unit); });
}

}  // namespace pipekernels
