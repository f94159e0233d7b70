//===- FlatCopyTest.cpp - the kernels against ATen ------------------------===//
#include "fsdp/Runtime/Collectives/FlatCopy.h"
#include "CudaFixture.h"
#include "fsdp/Runtime/Devices/FlatLayout.h"

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp::test {
namespace {

using namespace runtime;
using at::ScalarType;

constexpr ScalarType kFloats[] = {at::kFloat, at::kDouble, at::kHalf,
                                  at::kBFloat16};

/// Aligned rows and rows of odd bytes; more than a tile; padding.
const std::vector<std::vector<int64_t>> kShapes = {
    {8, 1024}, {7, 3}, {1}, {1, 9001}, {13, 129}, {kFlatTile + 1}, {64, 4096}};

at::Tensor stale(int64_t numel, ScalarType dtype) {
  return at::full({numel}, std::numeric_limits<double>::quiet_NaN(),
                  at::device(gpu().where()).dtype(dtype));
}

std::vector<at::Tensor> random(ScalarType dtype) {
  std::vector<at::Tensor> tensors;
  for (const std::vector<int64_t> &shape : kShapes)
    tensors.push_back(
        at::randn(shape, at::device(gpu().where()).dtype(at::kDouble))
            .mul_(100)
            .to(dtype));
  return tensors;
}

TEST(CudaFlatCopyTest, CopyInIsChunkCatOfAnyDtypesAndRanks) {
  for (ScalarType from : kFloats)
    for (ScalarType to : kFloats)
      for (int64_t ranks = 1; ranks <= 5; ++ranks) {
        std::vector<at::Tensor> grads = random(from);
        at::Tensor expected = at::_chunk_cat(grads, 0, ranks).to(to);
        at::Tensor flat = stale(expected.numel(), to);
        copyIn(flat, grads, ranks);
        EXPECT_TRUE(at::equal(flat, expected.flatten()))
            << from << " to " << to << ", " << ranks << " ranks";
      }
}

TEST(CudaFlatCopyTest, CopyOutReadsShardsAtAnyAlignment) {
  for (ScalarType from : kFloats)
    for (ScalarType to : kFloats) {
      // A stride of an odd number of elements after each shard.
      at::Tensor chunk =
          at::randn({5 * 5000}, at::device(gpu().where())).to(from);
      std::vector<at::Tensor> shards;
      for (int64_t numel : {0, 1, 4096, 4999, 4097})
        shards.push_back(stale(numel, to));
      copyOut(shards, chunk, {1, 3, 4099, 5000, 4101});
      int64_t begins[] = {0, 1, 4, 4103, 9103};
      for (size_t i = 0; i < shards.size(); ++i)
        EXPECT_TRUE(at::equal(
            shards[i],
            chunk.slice(0, begins[i], begins[i] + shards[i].numel()).to(to)))
            << from << " to " << to << ", shard " << i;
    }
}

TEST(CudaFlatCopyTest, TakesMoreTensorsThanALaunchHas) {
  std::vector<at::Tensor> grads;
  for (int64_t i = 0; i < 2 * kFlatTensors + 3; ++i)
    grads.push_back(at::randn({i % 5 + 1, 3}, at::device(gpu().where())));
  at::Tensor expected = at::_chunk_cat(grads, 0, 3).flatten();
  at::Tensor flat = stale(expected.numel(), at::kFloat);
  copyIn(flat, grads, 3);
  EXPECT_TRUE(at::equal(flat, expected));
}

/// The CPU's implementation is tested against ATen's on the CPU.
TEST(CudaFlatCopyTest, GivesTheBitsOfTheCpu) {
  std::vector<at::Tensor> grads = random(at::kFloat);
  std::vector<at::Tensor> onHost;
  int64_t numel = 0;
  for (const at::Tensor &grad : grads) {
    onHost.push_back(grad.cpu());
    numel += (grad.size(0) + 2) / 3 * (grad.numel() / grad.size(0)) * 3;
  }
  for (ScalarType to : {at::kFloat, at::kHalf, at::kBFloat16}) {
    at::Tensor flat = stale(numel, to);
    copyIn(flat, grads, 3);
    at::Tensor expected = at::empty({numel}, to);
    copyIn(expected, onHost, 3);
    EXPECT_TRUE(at::equal(flat.cpu(), expected)) << to;
  }
}

} // namespace
} // namespace fsdp::test
