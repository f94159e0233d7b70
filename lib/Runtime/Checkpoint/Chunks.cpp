//===- Chunks.cpp - a checkpoint as the boxes that ranks wrote ------------===//
#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace fsdp::runtime {

namespace {

struct Interval {
  int64_t begin = 0, end = 0;
};

/// A box by its bounds.
using Region = std::vector<Interval>;

Region regionOf(const Chunk &chunk) {
  Region region;
  for (size_t dim = 0; dim < chunk.offsets.size(); ++dim)
    region.push_back(
        {chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]});
  return region;
}

Chunk chunkOf(const Region &region) {
  Chunk chunk;
  for (Interval interval : region) {
    chunk.offsets.push_back(interval.begin);
    chunk.sizes.push_back(interval.end - interval.begin);
  }
  return chunk;
}

bool isEmpty(const Region &region) {
  return std::any_of(region.begin(), region.end(),
                     [](Interval i) { return i.begin >= i.end; });
}

Region intersect(const Region &a, const Region &b) {
  Region both(a.size());
  for (size_t dim = 0; dim < a.size(); ++dim)
    both[dim] = {std::max(a[dim].begin, b[dim].begin),
                 std::min(a[dim].end, b[dim].end)};
  return both;
}

/// Where a region is cut in two.
struct Cut {
  size_t dim = 0;
  int64_t at = 0;
};

/// Divides the tensor along the bounds of its chunks until each part lies in
/// all of the chunks that meet it; there must be one.
class Tiling {
public:
  Tiling(const std::vector<Region> &boxes) : boxes(boxes) {}

  /// The work would be out of proportion: no sharding cuts tensors so.
  struct TooEntangled {};

  /// A part that not exactly one chunk has, and the chunks that have it.
  struct Defect {
    Region part;
    std::vector<size_t> holders;
  };

  /// `meeting`: the boxes that have elements in `part`, which has some. Throws
  /// TooEntangled.
  std::optional<Defect> find(const Region &part, std::vector<size_t> meeting) {
    looks += meeting.size() + 1;
    if (looks > kLooks * (boxes.size() + kLooks))
      throw TooEntangled();
    std::optional<Cut> cut = middle(part, meeting);
    if (!cut) {
      if (meeting.size() == 1)
        return std::nullopt;
      return Defect{part, std::move(meeting)};
    }
    Region low = part, high = part;
    low[cut->dim].end = high[cut->dim].begin = cut->at;
    std::vector<size_t> below, above;
    for (size_t box : meeting) {
      if (boxes[box][cut->dim].begin < cut->at)
        below.push_back(box);
      if (boxes[box][cut->dim].end > cut->at)
        above.push_back(box);
    }
    meeting = {};
    if (auto defect = find(low, std::move(below)))
      return defect;
    return find(high, std::move(above));
  }

private:
  /// At each chunk, in the mean. Chunks along a dimension need log2 of their
  /// number; in many dimensions there are tilings that need more than n^10.
  static constexpr size_t kLooks = 256;

  /// The median of the bounds within the part, of the dimension that has most;
  /// none if every box has all of the part. So a call of find() halves what
  /// the next has to cut, and calls are nested a few dozen deep.
  std::optional<Cut> middle(const Region &part,
                            const std::vector<size_t> &meeting) {
    std::optional<size_t> best;
    size_t most = 0;
    auto within = [&](size_t dim, auto &&use) {
      for (size_t box : meeting)
        for (int64_t at : {boxes[box][dim].begin, boxes[box][dim].end})
          if (at > part[dim].begin && at < part[dim].end)
            use(at);
    };
    for (size_t dim = 0; dim < part.size(); ++dim) {
      size_t count = 0;
      within(dim, [&](int64_t) { ++count; });
      if (count > most) {
        most = count;
        best = dim;
      }
    }
    if (!best)
      return std::nullopt;
    bounds.clear();
    within(*best, [&](int64_t at) { bounds.push_back(at); });
    auto median = bounds.begin() + ptrdiff_t(bounds.size() / 2);
    std::nth_element(bounds.begin(), median, bounds.end());
    return Cut{*best, *median};
  }

  const std::vector<Region> &boxes;
  size_t looks = 0;
  std::vector<int64_t> bounds; ///< memory of middle()
};

void checkChunk(const std::string &name, const SavedTensor &tensor,
                const ChunkData &chunk) {
  const std::vector<int64_t> &offsets = chunk.chunk.offsets,
                             &sizes = chunk.chunk.sizes,
                             &shape = tensor.spec.shape;
  bool within = offsets.size() == shape.size() && sizes.size() == shape.size();
  for (size_t dim = 0; within && dim < shape.size(); ++dim)
    within = offsets[dim] >= 0 && sizes[dim] >= 0 &&
             offsets[dim] <= shape[dim] &&
             sizes[dim] <= shape[dim] - offsets[dim];
  auto fail = [&](const std::string &message) {
    throw InputError(chunk.file + ": tensor \"" + name + "\": " + message);
  };
  if (!within)
    fail("expected a chunk within " + describe(tensor.spec) + ", got " +
         describe(chunk.chunk));
  int64_t bytes = plan::TensorSpec{sizes, tensor.spec.dtype}.numBytes();
  if (uint64_t(bytes) != chunk.data.size())
    fail("expected " + std::to_string(bytes) + " bytes for " +
         describe(chunk.chunk) + " of " + describe(tensor.spec) + ", got " +
         std::to_string(chunk.data.size()));
}

} // namespace

std::string describe(const Chunk &box) {
  std::string text = "[";
  for (size_t dim = 0; dim < box.offsets.size(); ++dim) {
    int64_t begin = box.offsets[dim];
    text += (dim ? ", " : "") + std::to_string(begin) + ":";
    // Of any file: may lie anywhere, and may have fewer sizes.
    int64_t end = 0;
    bool counts = dim < box.sizes.size() &&
                  !__builtin_add_overflow(begin, box.sizes[dim], &end);
    text += counts ? std::to_string(end) : "?";
  }
  return text + "]";
}

int64_t checkedBytes(const std::string &place, const std::string &name,
                     const plan::TensorSpec &spec) {
  int64_t bytes = plan::byteWidth(spec.dtype);
  bool empty = false;
  for (int64_t extent : spec.shape) {
    empty |= extent == 0;
    if (extent < 0 ||
        __builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes))
      throw InputError(place + ": tensor \"" + name +
                       "\": expected a shape of less than 2^63 bytes, got " +
                       describe(spec));
  }
  return empty ? 0 : bytes;
}

void checkTiling(const std::string &place, const std::string &name,
                 const SavedTensor &tensor) {
  int64_t bytes = checkedBytes(place, name, tensor.spec);
  std::vector<Region> boxes;
  std::vector<const ChunkData *> chunks;
  for (const ChunkData &chunk : tensor.chunks) {
    checkChunk(name, tensor, chunk);
    Region box = regionOf(chunk.chunk);
    if (isEmpty(box))
      continue;
    boxes.push_back(std::move(box));
    chunks.push_back(&chunk);
  }
  if (bytes == 0)
    return;
  Region whole;
  for (int64_t extent : tensor.spec.shape)
    whole.push_back({0, extent});
  std::vector<size_t> all(boxes.size());
  for (size_t i = 0; i < all.size(); ++i)
    all[i] = i;
  std::optional<Tiling::Defect> defect;
  try {
    defect = Tiling(boxes).find(whole, std::move(all));
  } catch (const Tiling::TooEntangled &) {
    throw InputError(place + ": tensor \"" + name +
                     "\": expected chunks that are cut along dimensions of " +
                     describe(tensor.spec) + ", got " +
                     std::to_string(boxes.size()) +
                     " whose bounds cross too often to be checked");
  }
  if (!defect)
    return;
  std::string part =
      describe(chunkOf(defect->part)) + " of " + describe(tensor.spec);
  if (defect->holders.empty())
    throw InputError(place + ": tensor \"" + name + "\": no file has " + part);
  throw InputError(place + ": tensor \"" + name + "\": " + part +
                   " appears twice, in " + chunks[defect->holders[0]]->file +
                   " and " + chunks[defect->holders[1]]->file);
}

namespace {

/// Bytes from one element to the next along each dimension of a row-major box.
std::vector<int64_t> byteStrides(const std::vector<int64_t> &sizes,
                                 int64_t width) {
  std::vector<int64_t> strides(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = width;
    width *= sizes[dim];
  }
  return strides;
}

} // namespace

void copyBox(const SavedTensor &tensor, const Chunk &box,
             std::span<std::byte> to) {
  int64_t width = plan::byteWidth(tensor.spec.dtype);
  size_t dims = box.sizes.size();
  std::vector<int64_t> toStrides = byteStrides(box.sizes, width);
  Region wanted = regionOf(box);
  for (const ChunkData &chunk : tensor.chunks) {
    Region part = intersect(wanted, regionOf(chunk.chunk));
    if (isEmpty(part))
      continue;
    std::vector<int64_t> fromStrides = byteStrides(chunk.chunk.sizes, width);
    const std::byte *source = chunk.data.data();
    std::byte *target = to.data();
    std::vector<int64_t> sizes;
    for (size_t dim = 0; dim < dims; ++dim) {
      source += (part[dim].begin - chunk.chunk.offsets[dim]) * fromStrides[dim];
      target += (part[dim].begin - box.offsets[dim]) * toStrides[dim];
      sizes.push_back(part[dim].end - part[dim].begin);
    }
    // What is contiguous in both: the last dimension, and each before one of
    // which both have all.
    int64_t run = width;
    size_t outer = dims;
    while (outer > 0 && fromStrides[outer - 1] == run &&
           toStrides[outer - 1] == run)
      run *= sizes[--outer];
    std::vector<int64_t> index(outer, 0);
    while (true) {
      std::memcpy(target, source, size_t(run));
      size_t dim = outer;
      while (dim > 0 && ++index[dim - 1] == sizes[dim - 1]) {
        --dim;
        source -= (sizes[dim] - 1) * fromStrides[dim];
        target -= (sizes[dim] - 1) * toStrides[dim];
        index[dim] = 0;
      }
      if (dim == 0)
        break;
      source += fromStrides[dim - 1];
      target += toStrides[dim - 1];
    }
  }
}

} // namespace fsdp::runtime
