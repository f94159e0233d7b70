//===- FlatLayout.h - where tensors lie in a collective's flat buffer -----===//
//
// The input of a reduce-scatter is a row-major matrix with one row per rank.
// Each gradient has `width` columns of it, from `begin`: row r holds its
// elements [r * width, (r + 1) * width), and zeros behind its last one. That is
// at::_chunk_cat(gradients, 0, ranks), where width is ceil(dim0 / ranks) times
// the elements of one of the gradient's rows. A rank's output is such a matrix
// of one row.
//
// A copy is cut into tiles, one per block of threads on a GPU. This header is
// all of its index arithmetic, for the host and for the device: standard types
// only, so that a kernel takes the table by value and nothing has to be copied
// to the device before it.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_DEVICES_FLATLAYOUT_H
#define FSDP_RUNTIME_DEVICES_FLATLAYOUT_H

#include <cstdint>

#ifdef __CUDACC__
#define FSDP_HOST_DEVICE __host__ __device__
#else
#define FSDP_HOST_DEVICE
#endif

namespace fsdp::runtime {

/// The most tensors in one table: the table stays below the 4 KiB that every
/// GPU accepts as kernel parameters.
inline constexpr int32_t kFlatTensors = 96;
/// Elements of one tile; a multiple of every vector that a kernel loads.
inline constexpr int64_t kFlatTile = 4096;

enum class FlatElement : uint8_t { Float32, Float64, Float16, BFloat16 };
enum class FlatDirection : uint8_t { IntoFlat, OutOfFlat };

struct FlatTensor {
  void *data;        ///< contiguous, `numel` elements
  int64_t numel;     ///< at most rows * width
  int64_t width;     ///< columns of the matrix that it has, > 0
  int64_t begin;     ///< its first column
  int64_t firstTile; ///< of its rows * ceil(width / kFlatTile) tiles
};

/// Tensors of one dtype, and the matrix.
struct FlatTable {
  void *flat = nullptr;
  int64_t rows = 0;
  int64_t columns = 0; ///< of the matrix, all tensors' together
  int64_t tiles = 0;
  int32_t count = 0;
  FlatTensor tensors[kFlatTensors];
};

/// What one tile copies: `count` elements between `tensor` of the table's
/// tensor and `flat` of the matrix; `zeros` elements follow in the matrix.
struct FlatRange {
  int32_t index;  ///< of the tensor in the table
  int64_t tensor; ///< first element
  int64_t flat;   ///< first element
  int64_t count;
  int64_t zeros;
};

FSDP_HOST_DEVICE inline int64_t flatMin(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/// Tiles of one row of a tensor.
FSDP_HOST_DEVICE inline int64_t flatTilesPerRow(int64_t width) {
  return (width + kFlatTile - 1) / kFlatTile;
}

/// Adds a tensor to a table that has room for it; nothing is to be copied for
/// an empty one (width 0).
inline void addFlatTensor(FlatTable &table, void *data, int64_t numel,
                          int64_t width, int64_t begin) {
  if (width == 0)
    return;
  table.tensors[table.count++] = {data, numel, width, begin, table.tiles};
  table.tiles += table.rows * flatTilesPerRow(width);
}

/// The tile-th of table.tiles.
FSDP_HOST_DEVICE inline FlatRange flatRange(const FlatTable &table,
                                            int64_t tile) {
  int32_t low = 0;
  int32_t high = table.count - 1;
  while (low < high) {
    int32_t middle = (low + high + 1) / 2;
    if (table.tensors[middle].firstTile <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  const FlatTensor &tensor = table.tensors[low];
  int64_t perRow = flatTilesPerRow(tensor.width);
  int64_t row = (tile - tensor.firstTile) / perRow;
  int64_t column = (tile - tensor.firstTile) % perRow * kFlatTile;
  int64_t element = row * tensor.width + column;
  int64_t length = flatMin(kFlatTile, tensor.width - column);
  int64_t count = flatMin(length, tensor.numel - element);
  count = count < 0 ? 0 : count;
  return {low, element, row * table.columns + tensor.begin + column, count,
          length - count};
}

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_DEVICES_FLATLAYOUT_H
