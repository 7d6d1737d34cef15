// How the threads of a CUDA block copy or cast one tile of a plan. The tests call the same
// functions on the CPU, for one thread index after the other.
#pragma once

#include <cstdint>

#include "pipekernels/host/host_device.h"
#include "pipekernels/micro_batch/micro_batch_plan.h"
#include "pipekernels/micro_batch/micro_batch_unit.h"

namespace pipekernels {

// A table of units: rows.value x cols.value of them.
struct Table {
  Divisor rows, cols;
};

// Where the units of a table are: that of row r and column c at first + r * row + c * col.
template <typename Pointer>
struct Places {
  Pointer first;
  int32_t row, col;  // bytes

  PK_HOST_DEVICE int32_t offset(int32_t r, int32_t c) const { return r * row + c * col; }
};

template <typename Pointer>
PK_HOST_DEVICE inline Places<Pointer> places(Pointer first, int64_t row, int64_t col) {
  return {first, static_cast<int32_t>(row), static_cast<int32_t>(col)};
}

constexpr int kUnitsInFlight = 4;  // loads that a thread issues before its first store

// Moves the units at src, src + src_step, ... that come before the end, which is `left` away in
// steps of `step`.
template <typename Unit, typename Load, typename Store>
PK_HOST_DEVICE inline void move_run(const char* src, char* dst, int32_t src_step, int32_t dst_step,
                                    int32_t left, int32_t step, const Load& load,
                                    const Store& store) {
  PK_ROLLED
  for (; left > 0; left -= kUnitsInFlight * step) {
    Unit held[kUnitsInFlight];
    PK_UNROLL
    for (int k = 0; k < kUnitsInFlight; ++k) {
      if (k * step < left) held[k] = load(src + int64_t{k} * src_step);
    }
    PK_UNROLL
    for (int k = 0; k < kUnitsInFlight; ++k) {
      if (k * step < left) store(dst + int64_t{k} * dst_step, held[k]);
    }
    src += int64_t{kUnitsInFlight} * src_step;
    dst += int64_t{kUnitsInFlight} * dst_step;
  }
}

// Moves every `threads`-th unit of a table, row by row, from unit `thread` on.
template <typename Unit, typename Load, typename Store>
PK_HOST_DEVICE inline void move_wrapped(const Table& table, int32_t thread, int32_t threads,
                                        const Places<const char*>& from, const Places<char*>& to,
                                        const Load& load, const Store& store) {
  const auto cols = static_cast<int32_t>(table.cols.value);
  const auto row = static_cast<int32_t>(table.cols.quotient(thread));
  const auto step_rows = static_cast<int32_t>(table.cols.quotient(threads));
  const int32_t step_cols = threads - step_rows * cols;
  int32_t left = static_cast<int32_t>(table.rows.value) * cols - thread;
  if (left <= 0) return;
  int32_t col = thread - row * cols;
  const char* src = from.first + from.offset(row, col);
  char* dst = to.first + to.offset(row, col);
  const int32_t src_step = from.offset(step_rows, step_cols), src_wrap = from.offset(1, -cols);
  const int32_t dst_step = to.offset(step_rows, step_cols), dst_wrap = to.offset(1, -cols);
  PK_ROLLED
  for (; left > 0; left -= kUnitsInFlight * threads) {
    Unit held[kUnitsInFlight];
    char* targets[kUnitsInFlight];
    PK_UNROLL
    for (int k = 0; k < kUnitsInFlight; ++k) {
      if (k * threads < left) held[k] = load(src);
      targets[k] = dst;
      src += src_step;
      dst += dst_step;
      col += step_cols;
      if (col >= cols) {
        col -= cols;
        src += src_wrap;
        dst += dst_wrap;
      }
    }
    PK_UNROLL
    for (int k = 0; k < kUnitsInFlight; ++k) {
      if (k * threads < left) store(targets[k], held[k]);
    }
  }
}

// Moves one thread's share of a table: store(place, unit) with unit = load(place of `from`).
// Neighbouring threads take neighbouring columns, so their accesses coalesce. Where that leaves at
// most a quarter of the threads idle, each of them stays in its column, so that a step is the same
// everywhere.
template <typename Unit, typename Load, typename Store>
PK_HOST_DEVICE inline void move_units(const Table& table, int32_t thread, int32_t threads,
                                      const Places<const char*>& from, const Places<char*>& to,
                                      const Load& load, const Store& store) {
  const auto rows = static_cast<int32_t>(table.rows.value);
  const auto cols = static_cast<int32_t>(table.cols.value);
  int32_t row = 0, col = thread, step_rows = 0, step_cols = threads, left = cols - thread;
  if (rows > 1) {
    step_cols = 0;
    step_rows = static_cast<int32_t>(table.cols.quotient(threads));
    if (4 * (threads - step_rows * cols) > threads) {
      return move_wrapped<Unit>(table, thread, threads, from, to, load, store);
    }
    row = static_cast<int32_t>(table.cols.quotient(thread));
    col = thread - row * cols;
    left = row < step_rows ? rows - row : 0;
  }
  if (left <= 0) return;
  // A step beyond the table is never taken; its offset may not fit into 32 bits.
  const int32_t rows_on = step_rows < rows ? step_rows : 0;
  const int32_t cols_on = step_cols < cols ? step_cols : 0;
  move_run<Unit>(from.first + from.offset(row, col), to.first + to.offset(row, col),
                 from.offset(rows_on, cols_on), to.offset(rows_on, cols_on), left,
                 step_rows + step_cols, load, store);
}

// Copies a tile that is not transposed directly from source to destination.
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void copy_rows(const TiledCopy& copy, const Tile& tile, int32_t thread,
                                     int32_t threads) {
  constexpr auto kSize = static_cast<int32_t>(sizeof(Unit));
  const auto store = [&](char* place, const Unit& unit) {
    store_maybe_cast<kCasts>(copy, place, unit);
  };
  if (!kCasts && copy.src_col == kSize && copy.dst_col == kSize &&
      (tile.rows == 1 || tile.cols >= kUnitsInFlight * threads)) {
    // Compilers fold the steps into the addresses of loads and stores.
    const char* src = tile.src + thread * kSize;
    char* dst = tile.dst + thread * kSize;
    PK_ROLLED
    for (int32_t row = 0; row < tile.rows; ++row) {
      move_run<Unit>(src, dst, threads * kSize, threads * kSize, tile.cols - thread, threads,
                     load_unit<Unit>, store);
      src += copy.src_row;
      dst += copy.dst_row;
    }
    return;
  }
  move_units<Unit>({tile.row_blocks, tile.col_blocks}, thread, threads,
                   places(tile.src, copy.src_row, copy.src_col),
                   places(tile.dst, copy.dst_row, copy.dst_col), load_unit<Unit>, store);
}

// ---- transposed copies -------------------------------------------------------------------------
//
// They read along the source's fastest dimension and write along the destination's. In between, the
// tile is staged in shared memory, column after column. An odd pitch puts neighbours of a row into
// different banks of shared memory.
//
// Narrow units are packed if TiledCopy::pack allows it: threads read 4 bytes, with `pack` rows of a
// column, and write 4 bytes, with `pack` columns of a row. A thread moves a block of pack x pack
// units, whose columns it finds in `pack` parts of the shared memory: part j holds columns j,
// pack + j, ....

// The distance of columns in shared memory, in units of size `unit`, or in words of packed units.
PK_HOST_DEVICE inline int32_t staged_pitch(const Tile& tile) {
  return static_cast<int32_t>(tile.row_blocks.value | 1);
}

// The shared memory for a staged tile of up to `tile_bytes`. Padding adds at most half, since a
// padded tile has at least two rows.
PK_HOST_DEVICE constexpr int32_t staged_bytes(int32_t tile_bytes) {
  return tile_bytes + tile_bytes / 2;
}

// The places of a staged tile, or of one part of it, by columns and rows of units or of blocks.
template <int kSize, typename Pointer>
PK_HOST_DEVICE inline Places<Pointer> staged_columns(const Tile& tile, Pointer staged) {
  return {staged, kSize * staged_pitch(tile), kSize};
}

template <typename Pointer>
PK_HOST_DEVICE inline Places<Pointer> turned(const Places<Pointer>& places) {
  return {places.first, places.col, places.row};
}

template <typename Unit>
PK_HOST_DEVICE inline void stage_columns(const TiledCopy& copy, const Tile& tile, char* staged,
                                         int32_t thread, int32_t threads) {
  move_units<Unit>({tile.col_blocks, tile.row_blocks}, thread, threads,
                   places(tile.src, copy.src_col, copy.src_row),
                   staged_columns<sizeof(Unit)>(tile, staged), load_unit<Unit>, store_unit<Unit>);
}

// Call after all threads of the block have finished stage_columns().
template <typename Unit, bool kCasts>
PK_HOST_DEVICE inline void write_rows(const TiledCopy& copy, const Tile& tile, const char* staged,
                                      int32_t thread, int32_t threads) {
  move_units<Unit>(
      {tile.row_blocks, tile.col_blocks}, thread, threads,
      turned(staged_columns<sizeof(Unit)>(tile, staged)),
      places(tile.dst, copy.dst_row, copy.dst_col), load_unit<Unit>,
      [&](char* place, const Unit& unit) { store_maybe_cast<kCasts>(copy, place, unit); });
}

// One word per column, or per row, of a block.
template <int kPack>
struct Words {
  uint32_t of[kPack];
};

template <int kPack>
PK_HOST_DEVICE inline Words<kPack> load_words(const char* place, int64_t stride) {
  Words<kPack> words;
  PK_UNROLL
  for (int i = 0; i < kPack; ++i) words.of[i] = load_unit<uint32_t>(place + i * stride);
  return words;
}

template <int kPack>
PK_HOST_DEVICE inline void store_words(char* place, int64_t stride, const Words<kPack>& words) {
  PK_UNROLL
  for (int i = 0; i < kPack; ++i) store_unit<uint32_t>(place + i * stride, words.of[i]);
}

// Exchanges rows and columns of a block.
PK_HOST_DEVICE inline Words<2> transpose(const Words<2>& in) {
  return {{select_bytes(in.of[0], in.of[1], 0x5410), select_bytes(in.of[0], in.of[1], 0x7632)}};
}
PK_HOST_DEVICE inline Words<4> transpose(const Words<4>& in) {
  const uint32_t even01 = select_bytes(in.of[0], in.of[1], 0x6240);
  const uint32_t odd01 = select_bytes(in.of[0], in.of[1], 0x7351);
  const uint32_t even23 = select_bytes(in.of[2], in.of[3], 0x6240);
  const uint32_t odd23 = select_bytes(in.of[2], in.of[3], 0x7351);
  return {{select_bytes(even01, even23, 0x5410), select_bytes(odd01, odd23, 0x5410),
           select_bytes(even01, even23, 0x7632), select_bytes(odd01, odd23, 0x7632)}};
}

// The distance of the parts in shared memory.
PK_HOST_DEVICE inline int32_t part_bytes(const Tile& tile) {
  return static_cast<int32_t>(tile.col_blocks.value) * staged_pitch(tile) * 4;
}

template <int kPack>
PK_HOST_DEVICE inline void stage_packed(const TiledCopy& copy, const Tile& tile, char* staged,
                                        int32_t thread, int32_t threads) {
  const int32_t part = part_bytes(tile);
  move_units<Words<kPack>>(
      {tile.col_blocks, tile.row_blocks}, thread, threads,
      places(tile.src, kPack * copy.src_col, 4), staged_columns<4>(tile, staged),
      [&](const char* place) { return load_words<kPack>(place, copy.src_col); },
      [&](char* place, const Words<kPack>& words) { store_words(place, part, words); });
}

// Call after all threads of the block have finished stage_packed().
template <int kPack>
PK_HOST_DEVICE inline void write_packed(const TiledCopy& copy, const Tile& tile, const char* staged,
                                        int32_t thread, int32_t threads) {
  const int32_t part = part_bytes(tile);
  move_units<Words<kPack>>(
      {tile.row_blocks, tile.col_blocks}, thread, threads, turned(staged_columns<4>(tile, staged)),
      places(tile.dst, kPack * copy.dst_row, 4),
      [&](const char* place) { return load_words<kPack>(place, part); },
      [&](char* place, const Words<kPack>& words) {
        store_words(place, copy.dst_row, transpose(words));
      });
}

}  // namespace pipekernels
