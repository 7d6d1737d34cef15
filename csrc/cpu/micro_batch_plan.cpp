#include "pipekernels/micro_batch_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pipekernels {
namespace {

struct Dimension {
  int64_t size;
  int64_t src, dst;  // strides in bytes
};

using Dimensions = std::vector<Dimension>;  // outermost first

[[noreturn]] void reject(const std::string& why) {
  throw std::invalid_argument("copy_micro_batches: " + why);
}

void validate(const MicroBatchCopy& request) {
  using std::to_string;
  const size_t tensors = request.wholes.size();
  if (request.micro_batches.size() != tensors * request.sizes.size()) {
    reject(to_string(request.micro_batches.size()) + " micro-batch tensors for " +
           to_string(tensors) + " tensors and " + to_string(request.sizes.size()) +
           " micro-batches; give one for each pair");
  }
  int64_t total = 0;
  for (const int64_t size : request.sizes) {
    if (size < 0) reject("a micro-batch of negative size " + to_string(size));
    total += size;
  }
  for (const WholeTensor& whole : request.wholes) {
    const auto dims = static_cast<int64_t>(whole.shape.size());
    if (whole.item_size <= 0)
      reject("item size " + to_string(whole.item_size) + " is not positive");
    if (whole.strides.size() != whole.shape.size()) {
      reject("a tensor has not one stride per dimension");
    }
    if (request.dim < 0 || request.dim >= dims) {
      reject("dimension " + to_string(request.dim) + " of a tensor with " + to_string(dims));
    }
    if (whole.shape[request.dim] != total) {
      reject("micro-batches hold " + to_string(total) + " entries, the tensor has " +
             to_string(whole.shape[request.dim]));
    }
  }
  for (size_t i = 0; i < request.micro_batches.size(); ++i) {
    if (request.micro_batches[i].strides.size() != request.wholes[i % tensors].shape.size()) {
      reject("a micro-batch has not its tensor's number of dimensions");
    }
  }
}

// Outermost first in the destination, without dimensions of size one, neighbours that form one even
// stride in both tensors merged.
void simplify(Dimensions& dims) {
  const auto is_one = [](const Dimension& d) { return d.size == 1; };
  dims.erase(std::remove_if(dims.begin(), dims.end(), is_one), dims.end());
  std::sort(dims.begin(), dims.end(),
            [](const Dimension& a, const Dimension& b) { return a.dst > b.dst; });
  size_t merged = 0;
  for (const Dimension& d : dims) {
    if (merged > 0 && dims[merged - 1].src == d.src * d.size &&
        dims[merged - 1].dst == d.dst * d.size) {
      dims[merged - 1] = {dims[merged - 1].size * d.size, d.src, d.dst};
    } else {
      dims[merged++] = d;
    }
  }
  dims.resize(merged);
}

// Whether neighbours along `a` are closer together in the source than along `b`. A broadcast
// dimension (stride 0) has no neighbours to fetch together.
bool reads_before(const Dimension& a, const Dimension& b) {
  return a.src > 0 && (b.src == 0 || a.src < b.src);
}

// The last dimension counts neighbouring bytes; make it count the widest units that everything is
// aligned to.
int32_t widen(Dimensions& dims, const char* src, const char* dst) {
  auto bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) |
              static_cast<uintptr_t>(dims.back().size) | 16;
  for (size_t i = 0; i + 1 < dims.size(); ++i) bits |= dims[i].src | dims[i].dst;
  const auto unit = static_cast<int32_t>(bits & -bits);
  Dimension& last = dims.back();
  last = {last.size / unit, unit, unit};
  if (last.size == 1 && dims.size() > 1) dims.pop_back();
  return unit;
}

// The largest power of two whose square is at most `area`.
int64_t square_side(int64_t area) {
  int64_t side = 1;
  while (4 * side * side <= area) side *= 2;
  return side;
}

class Planner {
 public:
  Planner(const TileShape& shape, size_t copies) : shape_(shape) { plan_.copies.reserve(copies); }

  // Leaves `dims` changed.
  void add(const char* src, char* dst, int64_t item_size, Dimensions& dims) {
    int64_t bytes = item_size;
    for (const Dimension& d : dims) bytes *= d.size;
    if (bytes == 0) return;
    plan_.bytes += bytes;
    simplify(dims);
    if (!dims.empty() && dims.back().src == item_size && dims.back().dst == item_size) {
      dims.back() = {dims.back().size * item_size, 1, 1};
    } else {
      dims.push_back({item_size, 1, 1});
    }
    const int32_t unit = widen(dims, src, dst);
    emit(src, dst, unit, dims);
  }

  Plan take() { return std::move(plan_); }

 private:
  void emit(const char* src, char* dst, int32_t unit, Dimensions& dims) {
    constexpr size_t kDims = 4;
    if (dims.size() > kDims) {  // peel the smallest dimension, but never the columns
      const auto smallest =
          std::min_element(dims.begin(), dims.end() - 1,
                           [](const Dimension& a, const Dimension& b) { return a.size < b.size; });
      const Dimension peeled = *smallest;
      dims.erase(smallest);
      for (int64_t i = 0; i < peeled.size; ++i) {
        Dimensions rest = dims;
        emit(src + i * peeled.src, dst + i * peeled.dst, unit, rest);
      }
      return;
    }
    const Dimension cols = dims.back();
    dims.pop_back();
    const auto fastest = std::min_element(dims.begin(), dims.end(), reads_before);
    const bool transposed = fastest != dims.end() && cols.src > 0 && reads_before(*fastest, cols);
    Dimension rows{1, 0, 0};
    if (!dims.empty()) {
      const auto chosen = transposed ? fastest : dims.end() - 1;
      rows = *chosen;
      dims.erase(chosen);
    }
    dims.insert(dims.begin(), 2 - dims.size(), Dimension{1, 0, 0});

    // What one dimension falls short of goes to the other.
    const int64_t area = (transposed ? shape_.transposed_bytes : shape_.run_bytes) / unit;
    int64_t tile_cols = std::min(cols.size, transposed ? square_side(area) : area);
    const int64_t tile_rows = std::min(rows.size, area / tile_cols);
    tile_cols = std::min(cols.size, area / tile_rows);

    TiledCopy copy{src,
                   dst,
                   {dims[0].size, dims[1].size},
                   {dims[0].src, dims[1].src},
                   {dims[0].dst, dims[1].dst},
                   rows.size,
                   cols.size,
                   rows.src,
                   rows.dst,
                   cols.src,
                   cols.dst,
                   (rows.size + tile_rows - 1) / tile_rows,
                   (cols.size + tile_cols - 1) / tile_cols,
                   plan_.tiles,
                   static_cast<int32_t>(tile_rows),
                   static_cast<int32_t>(tile_cols),
                   unit,
                   transposed};
    plan_.tiles += copy.tiles();
    plan_.copies.push_back(copy);
  }

  TileShape shape_;
  Plan plan_;
};

}  // namespace

Plan plan_tiles(const MicroBatchCopy& request, const TileShape& shape) {
  validate(request);
  const size_t tensors = request.wholes.size();
  Planner planner(shape, request.micro_batches.size());
  Dimensions dims;    // one vector for all, as there may be many small copies
  int64_t start = 0;  // of the micro-batch, along the batch dimension
  for (size_t i = 0; i < request.sizes.size(); ++i) {
    for (size_t t = 0; t < tensors; ++t) {
      const WholeTensor& whole = request.wholes[t];
      const MicroBatch& part = request.micro_batches[i * tensors + t];
      const bool split = request.direction == Direction::kSplit;
      dims.resize(whole.shape.size());
      for (size_t d = 0; d < dims.size(); ++d) {
        const int64_t size =
            static_cast<int64_t>(d) == request.dim ? request.sizes[i] : whole.shape[d];
        const int64_t in_whole = whole.strides[d] * whole.item_size;
        const int64_t in_part = part.strides[d] * whole.item_size;
        dims[d] = split ? Dimension{size, in_whole, in_part} : Dimension{size, in_part, in_whole};
      }
      char* slice = whole.data + start * whole.strides[request.dim] * whole.item_size;
      if (split) {
        planner.add(slice, part.data, whole.item_size, dims);
      } else {
        planner.add(part.data, slice, whole.item_size, dims);
      }
    }
    start += request.sizes[i];
  }
  return planner.take();
}

}  // namespace pipekernels
